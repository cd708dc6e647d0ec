"""Losses and metrics on answers only: prompts and answers, chats, truncation, errors."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.tiny import OPT, WORDS, opt_folder, tokenizer, write_jsonl
from support.tolerance import near

import unskew
from unskew.data.load import load_federation
from unskew.data.readers import answers
from unskew.data.readers.tokenization import AnsweredText, make_tokenizer
from unskew.errors import ConfigError, DataError
from unskew.models.registry import resolve_model
from unskew.tasks.registry import TASKS

TASK = TASKS["language"]
END = 2
OPENING = "{% if add_generation_prompt %}blue {% endif %}"
"""Template of the generation prompt."""
PLAIN = (
    "{% for m in messages %}{{ {'system': 'old', 'user': 'red', 'assistant': 'blue'}[m.role] }} {{ m.content }} </s> "
    "{% endfor %}" + OPENING
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}blue {% generation %}{{ m.content }} </s>{% endgeneration %} "
    "{% else %}{{ {'system': 'old', 'user': 'red'}[m.role] }} {{ m.content }} </s> {% endif %}{% endfor %}" + OPENING
)
CHAT = [
    {"role": "system", "content": "is very"},
    {"role": "user", "content": "the cat sees"},
    {"role": "assistant", "content": "a dog"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "not today"},
]


def questions(n=12, seed=0):
    draws = np.random.default_rng(seed)

    def some(low, high):
        return " ".join(draws.choice(WORDS, draws.integers(low, high)))

    return [{"question": some(2, 6), "reply": some(1, 5), "site": "ab"[number % 2]} for number in range(n)]


def chat_folder(path, template):
    words = tokenizer()
    words.chat_template = template
    words.save_pretrained(path)
    return str(path)


def ids(text):
    return tokenizer().convert_tokens_to_ids(text.split())


def load(path, tokens, **text):
    return load_federation(
        f"table:{path}", partition="iid", clients=1, holdout=0.0, text={"tokenizer": str(tokens), **text}
    )


def test_only_answers_count_in_loss_and_metrics(tmp_path):
    some = questions()
    path = write_jsonl(tmp_path / "qa.jsonl", some)
    fed = load(path, chat_folder(tmp_path / "words", None), prompt="question", answer="reply")
    x, y = torch.cat([fed.clients[0].x, fed.test[0]]), torch.cat([fed.clients[0].y, fed.test[1]])
    torch.manual_seed(0)
    model = resolve_model("hf:opt", (9,), 24, {"pretrained": False, "config": {"vocab_size": 24, **OPT}}, "language")
    model = model.double().eval()
    total = 0.0
    count = 0
    exact = 0
    with torch.no_grad():
        for row in some:
            prompt, answer = ids("</s> " + row["question"]), [*ids(row["reply"]), END]
            right = []
            for number, token in enumerate(answer):
                logits = model(torch.tensor([prompt + answer[:number]]))[0, -1].numpy()
                total -= logits[token] - np.log(np.exp(logits).sum())
                count += 1
                right.append(int(logits.argmax()) == token)
            exact += all(right)
        logits = model(x)
    assert len(y) == len(some)
    assert int((y >= 0).sum()) == count
    assert float(TASK.loss(logits, y)) == near(total / count)
    metrics = TASK.measure(TASK.tally(TASK.correct(logits, y), y), total / count)
    assert metrics == {"perplexity": pytest.approx(np.exp(total / count)), "exact_match": exact / len(some)}


def test_exact_match_needs_every_target_of_a_text():
    y = torch.tensor([[1, 2, -1], [-1, 0, 1], [-1, -1, -1], [2, 2, 2]])
    guess = torch.tensor([[1, 2, 0], [2, 0, 1], [0, 0, 0], [2, 1, 2]])
    logits = torch.nn.functional.one_hot(guess, 3).double()
    assert TASK.tally(TASK.correct(logits, y), y).tolist() == [2, 3]  # the third text has no target
    assert TASK.measure(TASK.tally(TASK.correct(logits, y), y), 0.0)["exact_match"] == pytest.approx(2 / 3)
    assert TASK.measure(TASK.empty_tally(3), 0.0)["exact_match"] == 0


def test_each_client_has_perplexity_and_exact_match_of_both_models(tmp_path):
    path = write_jsonl(tmp_path / "qa.jsonl", questions(60))
    folder = opt_folder(tmp_path / "opt")
    unskew.run(
        data=f"text:{path}", text={"prompt": "question", "answer": "reply"}, model={"hf": str(folder)}, rounds=1, lr=0.1,
        partition="natural:site", local_steps=2, method="fedper", out=tmp_path / "run", engine="inline", holdout=0.3,
    )  # fmt: skip
    for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines():
        row = json.loads(line)
        for own in ("", "personal_"):
            assert row[f"{own}perplexity"] == pytest.approx(np.exp(row[f"{own}loss"]))
            assert 0 <= row[f"{own}exact_match"] <= row[f"{own}accuracy"] * row["num_held_out"]


def test_bytes_end_an_answer_and_long_answers_are_truncated(tmp_path):
    some = [{"q": "ab", "a": "cd"}, {"q": "ab", "a": "cdefgh"}, {"q": "abcdefgh", "a": "c"}] * 5
    path = write_jsonl(tmp_path / "qa.jsonl", some)
    fed = load(path, "bytes", prompt="q", answer="a", block=8)
    pairs = {(tuple(x.tolist()), tuple(y.tolist())) for x, y in zip(fed.clients[0].x, fed.clients[0].y, strict=True)}
    start = (256, *b"ab\n")
    assert pairs == {
        ((*start, *b"cd", -1), (-1, -1, -1, *b"cd", 256, -1)),
        ((*start, *b"cde"), (-2, -1, -1, *b"cdef")),
    }
    assert fed.warnings[0].startswith("qa, the training rows: 10 of 15 answers do not end within the first 8 tokens")
    assert "5 of them are dropped" in fed.warnings[0]
    with pytest.raises(DataError, match=r"no text has an answer within its first 4 tokens\. Set text\.block"):
        load(path, "bytes", prompt="q", answer="a", block=4)


def test_a_truncated_answer_is_no_exact_match_and_leaves_loss_and_accuracy():
    texts = [AnsweredText([0, 1, 2], [False, True, True]), AnsweredText([0, 1, 2, 1], [False, True, True, True])]
    x, y, _ = answers.cut_answered(texts, 3, "texts")
    assert (x, y) == ([[0, 1], [0, 1, -1]], [[1, 2], [1, 2, -2]])  # all of its targets count, so one position is added
    y = torch.tensor([[1, 2, -1], y[1]])
    logits = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.scatter_(2, y.clamp_min(0)[..., None], 9.0)
    assert TASK.tally(TASK.correct(logits, y), y).tolist() == [1, 2]
    assert TASK.correct(logits, y).tolist() == [1, 1]
    assert TASK.predictions(y).tolist() == [2, 2]
    each = [[float(logits[i, t].logsumexp(0) - 9) for t in range(2)] for i in range(2)]
    assert TASK.losses(logits, y).tolist() == near([sum(row) / 2 for row in each])
    assert float(TASK.loss(logits, y)) == near(sum(map(sum, each)) / 4)
    mapped = torch.func.vmap(TASK.loss)(logits[None], y[None])
    assert float(mapped) == near(sum(map(sum, each)) / 4)


def test_chats_in_which_the_assistant_says_nothing_are_dropped_with_a_warning(tmp_path, monkeypatch):
    words = chat_folder(tmp_path / "words", MARKED.replace(" </s>{% endgeneration %}", "{% endgeneration %} </s>"))
    warnings = []
    monkeypatch.setattr(answers.LOG, "warning", lambda text, *values: warnings.append(text % values))

    def chats(*said):
        some = [{"m": [{"role": "user", "content": "the"}, {"role": "assistant", "content": text}]} for text in said]
        return load(write_jsonl(tmp_path / "chats.jsonl", some), words, messages="m")

    fed = chats(*["", "a dog"] * 5)
    assert len(fed.clients[0].y) + len(fed.test[1]) == 5
    assert warnings == [
        "chats, the training rows: the assistant says nothing in 5 of 10 texts, which are dropped. Fill in the messages of "
        "the assistant, or remove these texts."
    ]
    with pytest.raises(DataError, match=r"says nothing in any text.* Fill in the messages"):
        chats("", "", "")


@pytest.mark.parametrize("template", [pytest.param(PLAIN, id="prefixes"), pytest.param(MARKED, id="marked")])
def test_only_turns_of_the_assistant_count(template, tmp_path):
    words = make_tokenizer(chat_folder(tmp_path / "words", template))
    encoded = words.chats([CHAT])[0]
    assert encoded.ids == ids("old is very </s> red the cat sees </s> blue a dog </s> red and </s> blue not today </s>")
    counted = [token for token, counts in zip(*encoded, strict=True) if counts]
    assert counted == ids("a dog </s> not today </s>")


CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} \n {{ m.content }} "
    "{% for call in m.tool_calls %}{{ call.name }} {{ call.arguments.city }} {% endfor %}<|im_end|> \n {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant \n {% endif %}"
)


def chatml_folder(path, eos, template=CHATML):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "tool", "hi", "yo", "weather", "Oslo"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token=eos, extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    words.chat_template = template
    words.save_pretrained(path)
    return str(path)


def counted_words(folder, *messages):
    words = make_tokenizer(folder)
    encoded = words.chats([messages])[0]
    return " ".join(
        words.tokenizer.convert_ids_to_tokens(number) for number, counts in zip(*encoded, strict=True) if counts
    )


HI, CALL = {"role": "user", "content": "hi"}, {"name": "weather", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize("eos", ["<|im_end|>", "<unk>"])
def test_a_turn_counts_up_to_its_end_token_but_not_the_whitespace_after_it(eos, tmp_path):
    folder = chatml_folder(tmp_path / "words", eos)
    assert counted_words(folder, HI, {"role": "assistant", "content": "yo \n yo"}, HI) == "yo \n yo <|im_end|>"
    assert counted_words(folder, HI, {"role": "assistant", "content": "unknown"}) == "<unk> <|im_end|>"
    endless = chatml_folder(tmp_path / "endless", eos, CHATML.replace("<|im_end|>", ""))
    assert counted_words(endless, HI, {"role": "assistant", "content": "yo"}) == "yo \n"


def test_tool_calls_reach_the_template_and_turns_without_text_do_not_count(tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [HI, called, {"role": "tool", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    column = pa.array([messages, messages[:1] + messages[3:]])  # all messages have all entries, some of them null
    chat, short = answers.read_chats(column, "m", "chats")
    assert chat == [HI, {**called, "content": ""}, *messages[2:]]
    assert short == [HI, messages[3]]
    folder = chatml_folder(tmp_path / "words", "<|im_end|>")
    assert counted_words(folder, *chat) == "weather Oslo <|im_end|> yo <|im_end|>"
    assert counted_words(folder, HI, {"role": "assistant", "content": ""}, *messages[2:]) == "yo <|im_end|>"
    dated = pa.array([[{**called, "tool_calls": [{**CALL, "arguments": {"day": datetime.date(2024, 1, 31)}}]}]])
    with pytest.raises(DataError, match=r"row 0 .* has a message with 2024-01-31, which is read as a date"):
        answers.read_chats(dated, "m", "chats")


@pytest.mark.parametrize("template", [pytest.param(PLAIN, id="prefixes"), pytest.param(MARKED, id="marked")])
def test_a_template_that_prints_the_date_prints_the_same_every_day(template, tmp_path):
    words = tokenizer()
    words.add_tokens(["26", "Jul", "2024", "Friday"])
    words.chat_template = "{{ strftime_now('%d %b %Y %A') }} " + template
    words.save_pretrained(tmp_path / "words")
    encoded = make_tokenizer(str(tmp_path / "words")).chats([CHAT])[0]
    assert words.convert_ids_to_tokens(encoded.ids[:5]) == ["26", "Jul", "2024", "Friday", "old"]
    plain = make_tokenizer(chat_folder(tmp_path / "plain", template)).chats([CHAT])[0]
    assert (encoded.ids[4:], encoded.counts[4:]) == plain


def test_a_chat_trains_from_a_file(tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT, "n": n} for n in range(10)])
    words = chat_folder(tmp_path / "words", PLAIN)
    fed = load(path, words, messages="messages")
    x, y = fed.clients[0].x[0], fed.clients[0].y[0]
    assert (fed.task, fed.classes) == ("language", 24)
    assert y[y >= 0].tolist() == ids("a dog </s> not today </s>")
    assert bool((x[1:][y[:-1] >= 0] == y[:-1][y[:-1] >= 0]).all())


def test_chats_and_answers_reject_what_they_cannot_use(tmp_path):
    words = chat_folder(tmp_path / "words", PLAIN)

    def rejects(error, match, row, tokens=words, **text):
        path = write_jsonl(tmp_path / "rows.jsonl", [row] * 3)
        with pytest.raises(error, match=match):
            load(path, tokens, **text)

    chat = {"messages": CHAT}
    rejects(DataError, "requires a tokenizer with a chat template", chat, "bytes", messages="messages")
    bare = chat_folder(tmp_path / "bare", None)
    rejects(DataError, "has no chat template, which text.messages requires", chat, bare, messages="messages")
    shortens = "{% for m in messages %}{{ m.content if loop.last else 'old' }} {% endfor %}"
    changing = chat_folder(tmp_path / "changing", shortens)
    rejects(DataError, "changes a message when others follow it", chat, changing, messages="messages")
    strict = chat_folder(tmp_path / "strict", "{{ raise_exception('no system messages') }}")
    rejects(DataError, "rejects a chat with the roles system, user.*: no system", chat, strict, messages="messages")
    rejects(DataError, "no column 'chat'", chat, messages="chat")
    rejects(DataError, "row 0 of the column 'messages' has str", {"messages": "hello"}, messages="messages")
    unknown = {"messages": [{"role": "bot", "content": "a"}]}
    rejects(DataError, r"message with the role 'bot'. A message has a role \(system", unknown, messages="messages")
    silent = {"messages": [{"role": "user", "content": None}]}
    rejects(DataError, "message with the content None", silent, messages="messages")
    alternating = chat_folder(tmp_path / "alternating", "{{ messages[0].content }}")
    rejects(
        DataError, "a chat that starts with the assistant: ", {"messages": CHAT[2:]}, alternating, messages="messages"
    )
    rejects(DataError, "no message of the assistant", {"messages": CHAT[:2]}, messages="messages")
    pair = {"q": "the cat", "a": " "}
    rejects(DataError, "row 0 has an empty answer", pair, prompt="q", answer="a")
    rejects(ConfigError, "need each other", pair, prompt="q")
    rejects(ConfigError, "use one of text.columns, text.prompt", pair, prompt="q", answer="a", messages="m")
    endless = tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    rejects(DataError, "has no end token", {**pair, "a": "dog"}, str(tmp_path / "endless"), prompt="q", answer="a")
    path = write_jsonl(tmp_path / "rows.jsonl", [{**pair, "label": "x"}] * 3)
    with pytest.raises(ConfigError, match="label=label is for the classification of texts, but q and a are for"):
        load_federation(f"text:{path}", label="label", text={"prompt": "q", "answer": "a", "tokenizer": "bytes"})
