"""Text to token ids in several processes, in the order of the text and with bounded memory. Floor 4.

A worker gets a range of bytes, reads it itself and sends back arrays, so little travels between processes. Every
worker has a few chunks at a time; results are taken in the order of the chunks.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.sentences import SentenceSplitter
from megatron_parm.data.text_chunks import BrokenLine, TextChunk, read_texts
from megatron_parm.errors import DataError
from megatron_parm.tokenizers.base import Tokenizer

_CHUNKS_PER_WORKER = 3
LONG_SEQUENCE = 512  # ids; Megatron's BERT leaves out a document with a longer sentence


@dataclass(frozen=True)
class EncodeRules:
    """Which fields become token ids, and whether `eod` ends each document (None: nothing does).

    `splitter` makes one sequence of each sentence; without it a document is one sequence. `unknown` is the id to count.
    """

    keys: tuple[str, ...]
    dtype: "np.dtype[np.integer]"
    eod: int | None
    splitter: SentenceSplitter | None = None
    unknown: int | None = None


@dataclass(frozen=True)
class EncodedColumn:
    """The documents of one key: ids back to back, length of each sequence, sequences of each document.

    `num_empty` documents were left out, `num_unknown` ids are unknown, `num_long` documents have a sequence of more
    than 512 ids.
    """

    ids: NDArray[np.integer]
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]
    num_empty: int
    num_unknown: int
    num_long: int


@dataclass(frozen=True)
class EncodedChunk:
    """What became of one chunk: a column per key, and the places that gave no document."""

    source: TextChunk
    columns: tuple[EncodedColumn, ...]
    num_documents: int
    broken: tuple[BrokenLine, ...]


def encode_chunk(chunk: TextChunk, tokenizer: Tokenizer, rules: EncodeRules) -> EncodedChunk:
    """Encode one chunk. A document that is broken for one key is left out for all."""
    found, broken = read_texts(chunk, rules.keys)
    lines, texts = [line for line, _ in found], [texts for _, texts in found]
    try:
        encoded = [_encode_column(column, tokenizer, rules.splitter) for column in zip(*texts, strict=True)]
    except DataError:  # a tokenizer that refuses some text: find out which
        encoded = _encode_one_by_one(chunk, tokenizer, rules, lines, texts, broken)
    broken.sort(key=lambda place: place.line)
    columns = tuple(_column(ids, rules) for ids in encoded or [[] for _ in rules.keys])
    return EncodedChunk(chunk, columns, len(encoded[0]) if encoded else 0, tuple(broken))


def encode_chunks(
    chunks: Iterable[TextChunk], tokenizer: Tokenizer, rules: EncodeRules, num_workers: int
) -> Iterator[EncodedChunk]:
    """The encoded chunks in order. With one worker this process does the work itself."""
    if num_workers <= 1:
        for chunk in chunks:
            yield encode_chunk(chunk, tokenizer, rules)
        return
    with _workers(tokenizer, rules, num_workers) as connections:
        waiting: deque[Connection] = deque()
        for number, chunk in enumerate(chunks):
            if len(waiting) == num_workers * _CHUNKS_PER_WORKER:
                yield _receive(waiting.popleft())
            connection = connections[number % num_workers]
            _send(connection, chunk)
            waiting.append(connection)
        while waiting:
            yield _receive(waiting.popleft())


def _encode_column(
    texts: Sequence[str], tokenizer: Tokenizer, splitter: SentenceSplitter | None
) -> list[list[list[int]]]:
    """For each text the ids of its sequences; those without any id are left out."""
    if splitter is None:
        return [[ids] if ids and text else [] for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)]
    sentences = [splitter.split(text) for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for document in sentences for sentence in document]))
    return [[ids for ids in islice(encoded, len(document)) if ids] for document in sentences]


def _encode_one_by_one(
    chunk: TextChunk,
    tokenizer: Tokenizer,
    rules: EncodeRules,
    lines: Sequence[int],
    texts: Sequence[Sequence[str]],
    broken: list[BrokenLine],
) -> list[list[list[list[int]]]]:
    """As `_encode_column` for each key, without the documents that the tokenizer refuses; those go to `broken`."""
    rows = []
    for line, row in zip(lines, texts, strict=True):
        try:
            rows.append([_encode_column([text], tokenizer, rules.splitter)[0] for text in row])
        except DataError as error:
            broken.append(BrokenLine(chunk.path, line, str(error)))
    return [list(column) for column in zip(*rows, strict=True)]


def _column(encoded: Sequence[list[list[int]]], rules: EncodeRules) -> EncodedColumn:
    """Join the ids of the documents that have any, each with its end in its last sequence."""
    documents = [sequences for sequences in encoded if sequences]
    if rules.eod is not None:
        for sequences in documents:
            sequences[-1].append(rules.eod)
    counts = np.array([len(sequences) for sequences in documents], dtype=np.int32)
    flat = list(chain.from_iterable(documents))
    lengths = np.array([len(ids) for ids in flat], dtype=np.int32)
    joined = np.fromiter(chain.from_iterable(flat), dtype=rules.dtype, count=int(lengths.sum(dtype=np.int64)))
    num_unknown = 0 if rules.unknown is None else int(np.count_nonzero(joined == rules.unknown))
    num_long = sum(any(len(ids) > LONG_SEQUENCE for ids in sequences) for sequences in documents)
    return EncodedColumn(joined, lengths, counts, len(encoded) - len(documents), num_unknown, num_long)


@contextmanager
def _workers(tokenizer: Tokenizer, rules: EncodeRules, count: int) -> Iterator[list[Connection]]:
    """Forked processes that inherit the tokenizer, one connection each; they end with the block."""
    fork = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    processes = []
    try:
        for _ in range(count):
            ours, theirs = fork.Pipe()
            connections.append(ours)
            process = fork.Process(target=_work, args=(theirs, tuple(connections), tokenizer, rules), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, inherited: Sequence[Connection], tokenizer: Tokenizer, rules: EncodeRules) -> None:
    """Encode what comes until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops its workers
    for other in inherited:
        other.close()
    while True:
        try:
            chunk: TextChunk = connection.recv()
            connection.send(encode_chunk(chunk, tokenizer, rules))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _send(connection: Connection, chunk: TextChunk) -> None:
    try:
        connection.send(chunk)
    except OSError as error:
        raise _died() from error


def _receive(connection: Connection) -> EncodedChunk:
    try:
        encoded: EncodedChunk = connection.recv()
    except (EOFError, OSError) as error:
        raise _died() from error
    return encoded


def _died() -> DataError:
    return DataError("a worker process ended before its work was done (killed, or out of memory); use fewer --workers")
