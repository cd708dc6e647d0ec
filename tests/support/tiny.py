"""Tiny models of ``transformers`` with random weights, a tokenizer, and texts; made here, nothing is downloaded."""

import json

import numpy as np
import torch

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "likes",
    "hears",
    "old",
    "new",
    "red",
    "blue",
    "house",
    "tree",
    "river",
    "and",
    "not",
    "is",
    "very",
    "today",
]
OPT = {
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "dropout": 0.0,
}
BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2], "layer_type": "basic"}
GENRES = ("fiction", "slate", "travel")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def opt_folder(path, **changes):
    """A hub folder with a tiny OPT and its tokenizer."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(1)
    words = tokenizer()
    OPTForCausalLM(OPTConfig(vocab_size=len(words), **{**OPT, **changes})).save_pretrained(path)
    words.save_pretrained(path)
    return path


def rows(n=60, seed=0):
    """Pairs of texts of several lengths, each genre with words that it prefers."""
    draws = np.random.default_rng(seed)
    found = []
    for number in range(n):
        genre = number % len(GENRES)
        mine = WORDS[6 * genre : 6 * genre + 8]
        premise, hypothesis = (" ".join(draws.choice(mine, draws.integers(2, 8))) for _ in range(2))
        label = ("no", "yes")[int(mine[0] in premise)]
        found.append({"premise": premise, "hypothesis": hypothesis, "genre": GENRES[genre], "label": label})
    return found


def write_jsonl(path, some):
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path
