"""Conversations to ids. Reference: texts and marks worked by hand; the templates that Megatron has for its formats."""

import json

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megatron_parm.data.sft_chat import PROMPT_FORMATS, Message, conversations_of, encode_conversation
from megatron_parm.data.text_chunks import BrokenTextError
from megatron_parm.tokenizers.null import NullTokenizer
from megatron_parm.tokenizers.tokenizer_json import HuggingFaceTokenizer

CHAT = [Message("system", " Be brief. "), Message("user", "Hi <|im_end|>"), Message("assistant", " Yes. \n")]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A byte-level tokenizer with the control tokens of the formats."""
    folder = tmp_path_factory.mktemp("letters")
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    engine = FastTokenizer(models.BPE(vocab=alphabet, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    names = ["<|end|>", "<|im_start|>", "<|im_end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]
    engine.add_special_tokens(names)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return HuggingFaceTokenizer(folder)


WHOLE = {  # the answers between bars
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n"
    "<|im_start|>assistant\n|Yes.<|im_end|>\n<|end|>|",
    "sections": "### System:\nBe brief.\n\n### User:\nHi <|im_end|>\n\n### Assistant:\n|Yes.\n\n<|end|>|",
    "nemotron-h-aligned": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi <|im_end|>\n<SPECIAL_11>Assistant\n"
    "|Yes.\n<|end|>|",
    "nemotron-nano-v2": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi <|im_end|>\n<SPECIAL_11>Assistant\n"
    "|Yes.\n<SPECIAL_12>\n<|end|>|",
    "identity": " Be brief. Hi <|im_end|>| Yes. \n<|end|>|",
}


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_text_and_answers_of_every_format(letters, name) -> None:
    encoded = encode_conversation(CHAT, letters, PROMPT_FORMATS[name])
    before, answer, _ = WHOLE[name].replace("<|", "\0").replace("|>", "\1").split("|")
    before, answer = (part.replace("\0", "<|").replace("\1", "|>") for part in (before, answer))
    assert letters.decode(encoded.ids.tolist()) == before + answer
    assert letters.decode(encoded.ids[encoded.is_answer].tolist()) == answer
    assert not encoded.is_answer[: -encoded.is_answer.sum()].any()
    assert encoded.ids[-1] == letters.eod and encoded.is_answer[-1]


def test_control_tokens_are_ids_only_where_the_format_puts_them(letters) -> None:
    ids = encode_conversation(CHAT, letters, PROMPT_FORMATS["chatml"]).ids.tolist()
    assert ids.count(letters.special_tokens["<|im_end|>"]) == 3  # the user's own text of it is plain text
    plain = encode_conversation(
        [Message("user", "1 2"), Message("assistant", "3 4")], NullTokenizer(9), PROMPT_FORMATS["identity"]
    )
    assert (plain.ids.tolist(), plain.is_answer.tolist()) == ([1, 2, 3, 4, 9], [False, False, True, True, True])


def test_several_turns_and_a_question_at_the_end() -> None:
    turns = [
        Message(role, str(number)) for number, role in enumerate(("user", "assistant", "user", "assistant", "user"))
    ]
    encoded = encode_conversation(turns, NullTokenizer(9), PROMPT_FORMATS["identity"])
    assert encoded.ids.tolist() == [0, 1, 2, 3, 4, 9]
    assert encoded.is_answer.tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            [["user q", "assistant a"]],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [["user q", "assistant a"]],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, [["user q", "assistant a"]]),
        (
            {"instruction": "q", "input": "i", "output": "a", "system": "s"},
            [["system s", "user q\n\ni", "assistant a"]],
        ),
        ({"prompt": "q", "completion": "a"}, [["user q", "assistant a"]]),
        ({"question": "q", "answer": "a", "id": 3}, [["user q", "assistant a"]]),
        (
            {"messages": [{"role": role, "content": "x"} for role in ("system", "user", "assistant") * 2]},
            [["system x", "user x", "assistant x"]] * 2,
        ),
    ],
)
def test_every_shape_of_line(fields, turns) -> None:
    found = [[f"{message.role} {message.content}" for message in one] for one in conversations_of(fields)]
    assert found == turns


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": "q"}, r"neither a chat .* nor an instruction .*; the fields are: text"),
        ({"prompt": "q"}, "neither a chat"),
        ({"prompt": "q", "completion": 5}, "neither a chat"),
        ({"messages": []}, "field 'messages' must be a list of messages"),
        ({"messages": "q"}, "found str"),
        ({"messages": [{"role": "user"}]}, "message 1 of 'messages' must have the texts 'role' and 'content'"),
        ({"messages": ["q"]}, "message 1 of 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'; use system, user or assistant"),
        ({"messages": [{"role": "user", "content": "q"}]}, "without an answer"),
        ({"prompt": "q", "completion": " "}, "an empty answer"),
    ],
)
def test_a_line_that_is_no_conversation_says_why(fields, reason) -> None:
    with pytest.raises(BrokenTextError, match=reason):
        conversations_of(fields)
