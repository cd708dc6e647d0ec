# unskew with its tested versions, for the nodes of a cluster (Ray or Slurm); runs as a user without rights.
# docker build --tag unskew .
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 ray
WORKDIR /home/ray/unskew
COPY --chown=ray pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY --chown=ray unskew ./unskew

# PyTorch's build without CUDA is a fifth of the size; leave the index out for nodes with an accelerator.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch \
 && pip install --no-cache-dir --constraint constraints.txt '.[hub,ray,report,tune]'

USER 1000
ENV PYTHONUNBUFFERED=1
WORKDIR /home/ray
ENTRYPOINT ["unskew"]
CMD ["--help"]
