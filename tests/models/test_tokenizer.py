"""A small tokenizer made here: round trips, streams cut inside characters, chat templates in a sandbox."""

import json

import pytest

from kvlab.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<s>' + m.role + ': ' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}<s>a:{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    """Bytes as tokens, two special tokens, a start token put in front."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_directory(tmp_path, (7,))


TEXTS = ["", "a plain line\n", "naïve café, Привет, 日本語", "emoji \N{GRINNING FACE}\N{FAMILY}", "  spaces   kept  "]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_same_text_and_never_half_a_character(tokenizer, text):
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text, special=False)]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_stream_that_ends_inside_a_character_shows_so(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode("日", special=False)[:2]] == ["", ""]
    assert stream.finish() == "�"


def test_special_tokens(tokenizer):
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.encode("a", special=False) == [tokenizer.token_id("a")]
    ids = [tokenizer.token_id("a"), 257]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, special=True)) == ("a", "a</s>")
    assert tokenizer.eos_ids == (7, 257)
    assert (tokenizer.vocab_size, tokenizer.token(257), tokenizer.token(9999)) == (258, "</s>", "")


def test_what_the_trainer_cut_and_padded_to_is_forgotten(tokenizer, tmp_path):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_directory(tmp_path)
    for text in ("a", "a text of more than four tokens"):
        assert again.encode(text) == tokenizer.encode(text)


def test_chat(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_text(messages) == "<s>user: hi</s><s>a:"
    assert tokenizer.chat_text(messages, add_generation_prompt=False) == "<s>user: hi</s>"
    ids = tokenizer.encode_chat(messages)
    assert ids.count(256) == 2, "the template writes the start token, so none is put in front"
    with pytest.raises(ValueError, match=r"messages: the chat template refuses them \(no tools\)"):
        tokenizer.chat_text([{"role": "tool", "content": ""}])


def test_a_template_runs_in_a_sandbox(tokenizer):
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="the chat template refuses them"):
        tokenizer.chat_text([])


def test_no_template_and_no_tokenizer(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat: this model has no chat template"):
        tokenizer.chat_text([])
    assert Tokenizer.from_directory(tmp_path / "elsewhere") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)
