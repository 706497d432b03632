"""Reading conversations: every accepted form, and one clear line for each kind of broken one."""

from __future__ import annotations

import builtins
import gzip
import json
import lzma
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from medusa.train.conversation import BadRecord, read_conversations, read_records

USER, ANSWER = {"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "hi"}
GOOD = json.dumps({"messages": [USER, ANSWER]})


def write(path, *lines: str | bytes):
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return str(path)


def read_one(tmp_path, record):
    [conversation] = read_conversations(write(tmp_path / "data.jsonl", json.dumps(record)))
    return conversation


def test_messages_and_category(tmp_path):
    system = {"role": "system", "content": "be brief"}
    conversation = read_one(tmp_path, {"id": 7, "category": "math", "messages": [system, USER, ANSWER | {"name": "x"}]})
    assert conversation.messages == [system, USER, ANSWER]
    assert conversation.category == "math" and conversation.where.endswith("data.jsonl:1")


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "assistant"), ("user", "model")])
def test_sharegpt(tmp_path, names):
    turns = [{"from": "system", "value": "s"}, {"from": names[0], "value": "q"}, {"from": names[1], "value": "a"}]
    roles = [(m["role"], m["content"]) for m in read_one(tmp_path, {"conversations": turns}).messages]
    assert roles == [("system", "s"), ("user", "q"), ("assistant", "a")]


def test_conversations_with_role_and_content(tmp_path):
    assert read_one(tmp_path, {"conversations": [USER, ANSWER]}).messages == [USER, ANSWER]


def test_exact_ids_win_over_messages(tmp_path):
    record = {"prompt_ids": [1, 5], "answer_ids": [6, 2], "messages": [USER, ANSWER], "finish_reason": "stop"}
    conversation = read_one(tmp_path, record)
    assert (conversation.prompt_ids, conversation.answer_ids, conversation.messages) == ([1, 5], [6, 2], [])


def test_compressed_files_lists_and_several_sources(tmp_path):
    two_lines = f"{GOOD}\n\n{GOOD}\n".encode()
    sources = [
        write(tmp_path / "a.jsonl", two_lines),
        write(tmp_path / "b.jsonl.gz", gzip.compress(two_lines)),
        write(tmp_path / "c.jsonl.xz", lzma.compress(two_lines)),
        write(tmp_path / "d.json", f"[{GOOD},\n {GOOD}]"),
        write(tmp_path / "e.json.gz", gzip.compress(f" [{GOOD}, {GOOD}]".encode())),
        write(tmp_path / "f.json", two_lines),
        write(tmp_path / "g.jsonl", b"\xef\xbb\xbf" + two_lines.replace(b"\n", b"\r\n")),
    ]
    where = [conversation.where for conversation in read_conversations(sources)]
    assert len(where) == 14
    assert where[1] == f"{sources[0]}:3" and where[5] == f"{sources[2]}:3" and where[7] == f"{sources[3]}:record 2"


BAD = {
    "broken JSON": ('{"messages": [', "broken JSON"),
    "deeply nested": ("[" * 100_000, "broken JSON"),
    "not an object": ("[1, 2]", "not an object"),
    "no messages": ('{"text": "hi"}', "no messages"),
    "null messages": ('{"messages": null}', "no messages"),
    "messages is text": ('{"messages": "hi"}', "wrong type"),
    "turn is text": ('{"messages": ["hi"]}', "wrong type"),
    "empty": ('{"messages": []}', "empty conversation"),
    "no answer": (json.dumps({"messages": [USER]}), "no assistant turn"),
    "answer first": (json.dumps({"messages": [ANSWER, USER]}), "no user turn first"),
    "late system": (
        json.dumps({"messages": [USER, {"role": "system", "content": "x"}, ANSWER]}),
        "system turn not first",
    ),
    "unknown role": (json.dumps({"messages": [USER, {"role": "robot", "content": "x"}]}), "unknown role"),
    "role is a number": (json.dumps({"messages": [{"role": 1, "content": "x"}]}), "unknown role"),
    "role is a list": (json.dumps({"messages": [{"role": [], "content": "x"}]}), "unknown role"),
    "gpt under messages": (json.dumps({"messages": [USER, {"role": "gpt", "content": "x"}]}), "unknown role"),
    "content is null": (json.dumps({"messages": [USER, {"role": "assistant", "content": None}]}), "wrong type"),
    "answer is blank": (json.dumps({"messages": [USER, {"role": "assistant", "content": " \n"}]}), "empty answer"),
    "half a surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "not Unicode"),
    "not UTF-8": (b'{"messages": "\xff"}', "not UTF-8"),
    "ids of text": ('{"prompt_ids": "1 2", "answer_ids": [1]}', "bad token ids"),
    "ids with a boolean": ('{"prompt_ids": [1], "answer_ids": [true]}', "bad token ids"),
    "negative id": ('{"prompt_ids": [-1], "answer_ids": [1]}', "bad token ids"),
    "no ids": ('{"prompt_ids": [1], "answer_ids": []}', "bad token ids"),
    "half the ids": ('{"prompt_ids": [1]}', "ids incomplete"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_records_are_named_in_one_line_or_skipped_and_counted(tmp_path, case):
    line, reason = BAD[case]
    source = write(tmp_path / "data.jsonl", GOOD, line, GOOD)
    with pytest.raises(BadRecord) as error:
        list(read_conversations(source))
    message = str(error.value)
    assert message.startswith(f"{source}:2: got ") and ", expected " in message and "; fix" in message
    assert "\n" not in message and len(message) < 300 + len(source)
    skipped = Counter()
    kept = list(read_conversations(source, "skip", skipped))
    assert [conversation.where for conversation in kept] == [f"{source}:1", f"{source}:3"]
    assert skipped == {reason: 1}


def test_messages_say_what_was_got(tmp_path):
    source = write(tmp_path / "cut.jsonl", '{"messages": [', "")
    with pytest.raises(ValueError, match=r"cut.jsonl:1: got broken JSON \(Expecting value at column 15\)"):
        list(read_conversations(source))
    source = write(tmp_path / "data.jsonl", json.dumps({"messages": [USER, {"role": "robot", "content": "x"}]}))
    with pytest.raises(ValueError, match=r"got messages\[1\].role robot, expected one of system, user, assistant"):
        list(read_conversations(source))


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_sources_that_cannot_be_read_are_errors_even_when_skipping(tmp_path, on_bad_record):
    broken = gzip.compress((GOOD + "\n").encode() * 50)
    cases = {
        str(tmp_path): "got a directory, expected a file",
        str(tmp_path / "none.jsonl"): "got no such file, expected",
        "none.jsonl.xz": "got no such file, expected",
        write(tmp_path / "empty.jsonl"): "got no records, expected at least one",
        write(tmp_path / "blank.jsonl", "\n \n"): "got no records",
        write(tmp_path / "list.json", "[]"): "got no records",
        write(tmp_path / "cut.jsonl.gz", broken[:-12]): "expected a readable, complete file",
        write(tmp_path / "text.jsonl.gz", GOOD): "expected a readable, complete file",
        write(tmp_path / "cut.jsonl.xz", lzma.compress(GOOD.encode())[:-12]): "expected a readable, complete file",
        write(tmp_path / "lines.json", f"[{GOOD},\n{GOOD},\n]"): r"lines.json:\d: got broken JSON",
        write(tmp_path / "bytes.json", f"[{GOOD},\n".encode() + b'"\xff"]'): r"bytes.json:2: got the byte 0xff",
    }
    for source, expected in cases.items():
        with pytest.raises(ValueError, match=expected) as error:
            list(read_conversations(source, on_bad_record))
        assert source in str(error.value) and "\n" not in str(error.value)


def test_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": messages, "category": "c"}, {"messages": None, "category": None}]
    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    skipped = Counter()
    [conversation] = read_conversations(str(path), "skip", skipped)
    assert (conversation.messages, conversation.category) == (messages, "c") and skipped == {"no messages": 1}
    with pytest.raises(ValueError, match=r"chats\.parquet:row 2: got the keys category, messages"):
        list(read_conversations(str(path)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="expected a complete Parquet file"):
        list(read_conversations(str(path)))
    with pytest.raises(ValueError, match="got no such file, expected conversations as JSONL or Parquet"):
        list(read_conversations(str(tmp_path / "absent.parquet")))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs the package `pyarrow`"):
        list(read_conversations(str(path)))


def test_unknown_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data.on_bad_record is 'ignore', expected 'error' or 'skip'"):
        list(read_conversations(write(tmp_path / "a.jsonl", GOOD), "ignore"))


def test_hub_names_go_through_datasets_and_local_paths_win(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [json.loads(GOOD), {"messages": []}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    skipped = Counter()
    [conversation] = read_conversations("org/chats:test", "skip", skipped)
    assert asked == [("org/chats", "test")] and conversation.where == "org/chats:test:1" and skipped.total() == 1
    (tmp_path / "org").mkdir()
    write(tmp_path / "org" / "chats", GOOD)
    assert len(list(read_conversations("org/chats"))) == 1 and len(asked) == 1


def test_streaming_asks_the_hub_for_no_more_than_is_used(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    made = []

    def rows():
        for number in range(10**6):
            made.append(number)
            yield json.loads(GOOD)

    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("org/chats", "train", True)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    records = read_records(["org/chats"], streaming=True)
    assert [next(records)[1].where for _ in range(3)] == [f"org/chats:train:{n}" for n in (1, 2, 3)]
    records.close()
    assert len(made) < 10


def test_a_connection_that_breaks_off_is_one_line(monkeypatch):
    class HTTPError(Exception): ...

    def load_dataset(name, split):
        yield json.loads(GOOD)
        raise HTTPError("read timed out\nlong trace")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"^org/chats:train: got HTTPError \(read timed out\) behind row 1, expected"):
        list(read_conversations("org/chats"))


def test_a_missing_file_shows_before_another_is_read(tmp_path):
    first, last = write(tmp_path / "a.jsonl", "{"), str(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"gone\.jsonl: got no such file"):
        next(read_records([first, last]))


def test_hub_failures_say_what_to_do(monkeypatch):
    def load_dataset(name, split):
        raise FileNotFoundError("Dataset doesn't exist\nlong trace")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ValueError, match=r"org/none: got no such file and no Hub dataset .*split train .Dataset doesn't"
    ):
        list(read_conversations("org/none"))


def test_without_datasets_the_message_says_how_to_get_it(monkeypatch):
    real_import = builtins.__import__

    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(ValueError, match=r"pip install 'medusa-decoding\[train\]'"):
        list(read_conversations("org/chats"))
