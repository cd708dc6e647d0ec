"""Images and parquet files as the Hugging Face Hub has them."""

import io

import datasets
import pyarrow as pa
from PIL import Image
from pyarrow import parquet


def encode(image, form="PNG", mode=None):
    """Return an array of pixels as the content of an image file."""
    content, picture = io.BytesIO(), Image.fromarray(image)
    (picture if mode is None else picture.convert(mode)).save(content, form)
    return content.getvalue()


def write_hub_file(file, features, **columns):
    """Write a parquet file with the hub's schema and metadata; columns of images are lists of encoded images."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = {
        name: [{"bytes": content, "path": None} for content in values]
        if isinstance(features[name], datasets.Image)
        else values
        for name, values in columns.items()
    }
    parquet.write_table(pa.table(table, schema=datasets.Features(features).arrow_schema), file)
