"""Methods for LoRA factors on a small language model: how exact their averages are, and what they learn and send.

Five clients have generated pairs of sentences, each of one genre. A small transformer is first trained on pairs that
contradict each other or are neutral, of all genres. The clients then train LoRA factors, so that it answers the first
sentence of a pair with one that follows from it. Nothing is downloaded.

    nice -n 5 python examples/lora.py --out lora
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import unskew
from unskew.data.sentences import sentences

SIZE = {
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
FACTORS = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "fc1", "fc2"]}
METHODS = {
    "fedavg": ("fedavg", False),
    "freeze_a": ("fedavg", True),
    "flora": ("flora", False),
    "fedex": ("fedex", False),
    "fedsa": ("fedsa", False),
}
"""Method, and whether the first factor is frozen."""
RATES = (0.003, 0.01, 0.03, 0.1)
TUNING_SEED = 100


class EffectiveWeights(unskew.ClientRule):
    """Compares the model that clients receive with the mean of the models that they trained in the round before.

    Attributes:
        errors: In each round, the norm of the difference between both, relative to the norm of the mean update.
    """

    name, summary, paper = "effective-weights", "compares averages of weights with LoRA factors", "none"

    def __init__(self):
        self.round, self.trained, self.received, self.errors = -1, [], None, []

    def begin(self, ctx):
        if ctx.round != self.round:
            now = effective(ctx.spec, ctx.v_global)
            if self.trained:
                mean = torch.stack(self.trained).mean(0)
                self.errors.append(float((now - mean).norm() / (mean - self.received).norm()))
            self.round, self.trained, self.received = ctx.round, [], now
        return {}

    def end(self, ctx, carry, v):
        self.trained.append(effective(ctx.spec, v))


def effective(spec, v):
    """All weights ``W + s B A`` of layers with factors, as one vector."""
    values, weights = {**dict(spec.module.named_parameters()), **spec.parameters(v)}, []
    for name in values:
        layer, _, rest = name.partition(".lora_B.")
        if rest:
            product = values[name] @ values[f"{layer}.lora_A.{rest}"]
            scale = FACTORS["alpha"] / FACTORS["r"]
            weights.append((values[f"{layer}.base_layer.weight"] + scale * product).detach().reshape(-1))
    return torch.cat(weights)


def write(folder):
    """Write the pairs for the base and for the clients, and a tokenizer of words."""
    rows = sentences(0, 600)
    parts = {"base": [row for row in rows if row["label"] != "entailment"]}
    parts["clients"] = [row for row in rows if row["label"] == "entailment"]
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    words = {
        word for row in rows for name in ("premise", "hypothesis") for word in row[name].replace(".", " .").split()
    }
    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[END]", *sorted(words)])}
    tokens = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]")
    wrapped.save_pretrained(folder / "words")


def shared_settings(folder):
    """Settings of all runs."""
    return {
        "text": {"prompt": "premise", "answer": "hypothesis", "tokenizer": str(folder / "words")},
        "batch_size": 8,
        "optimizer": "adam",
        "engine": "inline",
    }


def settings_of(name, folder):
    """Settings of a method."""
    method, frozen = METHODS[name]
    return {
        **shared_settings(folder),
        "data": f"text:{folder / 'clients.jsonl'}",
        "partition": "natural:genre",
        "model": {"hf": str(folder / "base"), "lora": {**FACTORS, "freeze_a": frozen}},
        "method": method,
        "holdout": 0.25,
        "client_weighting": "uniform",
        "local_steps": 10,
    }


def train_base(folder):
    """Train a small transformer on the pairs for the base, and save it."""
    settings = {"data": f"text:{folder / 'base.jsonl'}", "partition": "iid", "clients": 1, "model": "hf:opt"}
    settings |= {"model_options": {"pretrained": False, "config": SIZE}, "rounds": 1, "local_steps": 1500, "lr": 0.003}
    unskew.run(**{**shared_settings(folder), **settings}).model.save(folder / "base")


def exactness(folder, rounds):
    """Relative errors of the averages, for each method and precision, per round."""
    errors = {}
    for name in ("fedavg", "freeze_a", "flora", "fedex"):
        for precision in ("fp32", "fp64"):
            settings, watch = settings_of(name, folder), EffectiveWeights()
            methods = {"method": [settings["method"], watch], "precision": precision}
            unskew.run(**{**settings, **methods}, lr=0.01, rounds=rounds + 1)
            errors[f"{name}, {precision}"] = watch.errors
    return errors


def results_of(name, folder, seed, rate, rounds):
    """Metrics of one run: those of the model that serves each client on its held-out texts, and traffic."""
    result = unskew.run(**settings_of(name, folder), seed=seed, lr=rate, rounds=rounds, eval_every=rounds)
    whose = "personal_" if METHODS[name][0] == "fedsa" else ""
    means = {
        metric: statistics.mean(row[f"{whose}{metric}"] for row in result.clients)
        for metric in ("loss", "perplexity", "exact_match")
    }
    sent = (result.summary["bytes_up"] + result.summary["bytes_down"]) / 1e6
    return {**means, "megabytes": sent}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("lora"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=20)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True)
    folder = arguments.out.resolve()
    write(folder)
    train_base(folder)
    errors = exactness(folder, 5)
    print("\n| method, precision | " + " | ".join(f"round {n}" for n in range(1, 6)) + " |")
    for name, values in errors.items():
        print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in values) + " |")
    outcomes = {}
    print("\n| method | learning rate | loss | perplexity | exact match | MB |")
    for name in METHODS:
        tuned = {rate: results_of(name, folder, TUNING_SEED, rate, arguments.rounds)["loss"] for rate in RATES}
        rate = min(tuned, key=tuned.get)
        runs = [results_of(name, folder, seed, rate, arguments.rounds) for seed in range(arguments.seeds)]
        outcomes[name] = {"lr": rate, "tuning": {str(r): loss for r, loss in tuned.items()}, "runs": runs}
        shown = []
        for metric in ("loss", "perplexity", "exact_match"):
            values = [run[metric] for run in runs]
            shown.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        print(f"| `{name}` | {rate} | " + " | ".join(shown) + f" | {runs[0]['megabytes']:.2f} |", flush=True)
    (arguments.out / "lora.json").write_text(json.dumps({"errors": errors, "outcomes": outcomes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
