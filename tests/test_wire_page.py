"""The page of the wire: its tables are the code's, and a reader made of its numbers alone reads.

The reader knows no more than the page says; it takes offsets, sizes and constants from its tables.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import ROOT

from mpcomp import Compressor, Link, TensorMeta, entropy, parse
from mpcomp.comm import stripes
from mpcomp.compressors import bits, klt, lowrank
from mpcomp.compressors.lloyd import gaussian_centroids
from mpcomp.core import bit_sum, threads, wire
from mpcomp.core.context import Step
from mpcomp.core.spec import registered
from mpcomp.entropy import ans, classes, coding, frequencies, message, neighbours

PAGE = (ROOT / "docs" / "develop" / "wire.md").read_text()
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "u8": torch.uint8,
}
TYPES = {"u8": "B", "u32": "I", "u64": "Q", "f32": "f"}


def tables() -> dict[str, list[dict[str, str]]]:
    """The rows of all tables by the first cell of the heading; of equal headings together."""
    found: dict[str, list[dict[str, str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        head, _, *rows = ([c.strip() for c in line.strip("|\n").split("|")]
                          for line in block.splitlines())  # fmt: skip
        found.setdefault(head[0], []).extend(dict(zip(head, row, strict=True)) for row in rows)
    return found


TABLES = tables()
FIELDS = {
    row["field"]: (int(row["offset"]), int(row["bytes"]), TYPES[row["type"]])
    for row in TABLES["field"]
}
NUMBERS = {row["constant"]: int(row["value"]) for row in TABLES["constant"]}
FORMS = {int(row["form"]): int(row["header bytes"]) for row in TABLES["form"]}
TOTAL, LOWEST = NUMBERS["frequencies of a table sum to"], NUMBERS["lowest state"]
ESCAPE = NUMBERS["escape symbol"]


# -- the tables are the code's --------------------------------------------------------------------


def test_the_header_is_the_structs_of_the_code():
    end = 0
    for offset, size, kind in FIELDS.values():
        assert (offset, size) == (end, struct.calcsize(f"<{kind}"))
        end += size
    code = [*wire._HEADER.format[1:], *wire._LENGTH.format[1:]]
    assert [kind for *_, kind in FIELDS.values()] == [*code, "Q"]
    assert FIELDS["status"][0] == wire._STATUS and FIELDS["form"][0] == wire._FORM
    assert FORMS == {
        0: wire.HEADER_BYTES,
        wire._LONG: wire.LONG_HEADER_BYTES,
        wire._LONG | wire._CHECKED: wire.CHECKED_HEADER_BYTES,
    }
    assert f"\n{wire._CONSTANT} is added to the form" in PAGE


def test_kinds_and_versions_are_the_codes():
    kinds = {row["name"]: int(row["kind"]) for row in TABLES["kind"]}
    code = {"dense": wire.DENSE, "compressed": wire.COMPRESSED, "no tensor": wire._NO_TENSOR}
    assert kinds == code
    assert f"`{bytes(wire.no_tensor().tolist()).hex()}`" in PAGE
    version, notice, _ = (row["today"] for row in TABLES["number"])
    assert (int(version), int(notice)) == wire.FORMAT
    assert f"| version | 0 | 1 | u8 | {wire.VERSION} |" in PAGE


def test_the_check_is_of_the_text_that_the_page_gives():
    text, number = re.search(r"the text is `(.+?)`, and the number is\s+(\d+)", PAGE).groups()
    assert wire.layout_check((TensorMeta((2, 24)),)) == zlib.crc32(text.encode()) == int(number)


def test_constants_are_the_codes():
    assert NUMBERS == {
        "factor": bit_sum._FACTOR,
        "step": bit_sum._STEP,
        "block": bit_sum._BLOCK,
        "last": bit_sum._LAST,
        "length": bit_sum._LENGTH,
        "frequencies of a table sum to": ans.TOTAL,
        "lowest state": ans.LOWEST,
        "escape symbol": ans.ESCAPE,
        "few integers: one context, one state": message.FEW,
        "states of more": message._STATES,
        "contexts of classes": classes.CONTEXTS,
        "contexts of neighbours": neighbours.CONTEXTS,
        "largest magnitude": entropy.LARGEST,
        "integers of a line": coding._LINE,
        "integers of a slice": threads._ELEMENTS,
    }
    assert f"stripes of ⌈n / connections⌉ bytes, and of {stripes.LEAST_BYTES} at the least" in PAGE
    (basis,) = (row["value"] for row in TABLES["limit"] if row["limit"] == "channels of a basis")
    assert int(basis) == klt.LARGEST_WIDTH
    assert entropy.max_bytes(7, 11) == 1 + 2 * 7 * 11


def test_kinds_of_streams_are_the_codes():
    kinds = {row["name"]: int(row["stream"]) for row in TABLES["stream"]}
    code = {
        "plain": coding._PLAIN,
        "classes, signed": coding._CLASSES[0],
        "classes": coding._CLASSES[1],
        "neighbours, signed": coding._NEIGHBOURS[0],
        "neighbours": coding._NEIGHBOURS[1],
        "dithered": coding._DITHERED[0],
        "slices": coding._SLICES,
    }
    # A later kind has a row of its own.
    assert {name: kind for name, kind in kinds.items() if name in code} == code


def test_packed_integers_are_as_the_page_says():
    for row in TABLES["width"]:
        width = int(row["width"])
        fields = tuple(int(size) for size in row["fields"].split(","))
        assert tuple(size for _, size in bits._fields(width)) == fields
        assert bits.packed_bytes(10, width) == int(row["bytes of 10 integers"])


def test_positions_take_the_code_that_the_page_says():
    order = [row["code"] for row in TABLES["code"] if "taken at" in row]
    assert order == [*bits._sizes(4096, 410)]
    for row in TABLES["code"]:
        if "taken at" in row:
            size = bits._sizes(4096, 410)[row["code"]]
            assert size == math.ceil(int(row["bits of n = 4096, k = 410"]) / 8)
            assert bits._cheapest(4096, int(row["taken at"].removeprefix("k = "))) == row["code"]


@pytest.mark.parametrize("row", TABLES["method"], ids=lambda row: row["method"])
def test_a_layout_is_the_methods(row):
    method, meta = parse(row["method"].strip("`")), TensorMeta((4, 16, 64))
    said = tuple(
        TensorMeta(tuple(map(int, sizes.split(","))), DTYPES[dtype])
        for dtype, sizes in re.findall(r"(\w+) \[([\d, ]+)\]", row["tensors"])
    )
    assert method.layout(meta) == said and method.wire_bytes(meta) == int(row["bytes"])


def test_each_compressor_of_the_library_has_a_layout_on_the_page():
    there = {type(parse(row["method"].strip("`"))) for row in TABLES["method"]}
    library = {cls for cls in registered(Compressor) if cls.__module__.startswith("mpcomp.")}
    assert library == there


def test_what_attacks_a_limit_exists():
    for row in TABLES["limit"]:
        assert Path(ROOT, row["attacked by"].strip("`")).is_file()


# -- a reader of the page's numbers ---------------------------------------------------------------


def field(raw: bytes, name: str):
    offset, _, kind = FIELDS[name]
    return struct.unpack_from(f"<{kind}", raw, offset)[0]


def mixed(n: int) -> int:
    n = (n * NUMBERS["factor"] + NUMBERS["step"]) % 2**64
    n ^= n >> 32
    n = n * NUMBERS["factor"] % 2**64
    return n ^ n >> 29 | 1


def word_sum(raw: bytes) -> int:
    total = 0
    for number, (word,) in enumerate(struct.iter_unpack("<q", raw)):
        block, i = divmod(number, NUMBERS["block"])
        own = word * mixed(i) + (word >> 32) * mixed(NUMBERS["block"] + i)
        total += own * mixed(2**40 + block)
    return total


def sum_of(raw: bytes) -> int:
    whole = len(raw) // 8 * 8
    total = word_sum(raw[:whole]) + len(raw) * NUMBERS["length"]
    if raw[whole:]:
        total += word_sum(raw[whole:].ljust(8, b"\0")) * NUMBERS["last"]
    return total % 2**64


def payload_of(raw: bytes, *layout: tuple[str, int]) -> list[np.ndarray]:
    """The tensors: (type, number of elements) each; -1 for all that is left."""
    at, found = FORMS[field(raw, "form") & 3], []
    for dtype, count in layout:
        kind = np.dtype(dtype)
        at += -at % kind.itemsize
        count = len(raw) - at if count < 0 else count
        found.append(np.frombuffer(raw, kind, count, at))
        at += count * kind.itemsize
    assert at == len(raw)
    return found


def fields_of(width: int) -> list[int]:
    return [8] * (width // 8) + [size for size in (4, 2, 1) if width % 8 & size]


def packed(count: int, width: int) -> int:
    return sum(-(-count * size // 8) for size in fields_of(width))


def unpacked(raw: np.ndarray, width: int, count: int) -> np.ndarray:
    out, at, offset = np.zeros(count, np.int64), 0, 0
    for size in fields_of(width):
        for i in range(count):
            byte, shift = divmod(i * size, 8)
            out[i] |= (int(raw[at + byte]) >> shift & (1 << size) - 1) << offset
        at += -(-count * size // 8)
        offset += size
    return out


def positions_of(raw: np.ndarray, n: int, k: int) -> np.ndarray:
    low = int(math.log2(n / k))
    split, upper = packed(k, low), k + (n - 1 >> low) + 1
    sizes = [packed(n, 1), split + packed(upper, 1), packed(k, (n - 1).bit_length())]
    code = TABLES["code"][sizes.index(min(sizes))]["code"]
    if code == "bitmask":
        return np.flatnonzero(unpacked(raw, 1, n))
    if code == "integers":
        return unpacked(raw, (n - 1).bit_length(), k)
    high = np.flatnonzero(unpacked(raw[split:], 1, upper)) - np.arange(k)
    return high << low | unpacked(raw[:split], low, k)


class Stream:
    """An entropy stream, read by the page."""

    def __init__(self, raw: np.ndarray) -> None:
        self.raw, self.at = bytes(raw), 0

    def take(self, kind: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.raw, kind, count, self.at)
        self.at += found.nbytes
        return found

    def table(self) -> list[int]:
        """Frequencies of the symbols."""
        (curve,) = self.take("u1", 1).tolist()
        if curve == int(TABLES["first byte"][1]["first byte"]):
            first, others = self.take("u1", 2).tolist()
            costs = [255] * first + self.take("u1", others + 1).tolist()
        else:
            for row in TABLES["e"]:
                begin, end = map(int, row["curves"].split(" to "))
                if begin <= curve <= end:
                    i, e = int(row["first i"]) + curve - begin, float(row["e"])
            (last,) = self.take("u1", 1).tolist()
            costs = [min(254, round(2 ** (i / 4) * k**e)) for k in range(last + 1)]
        weights = [0 if c == 255 else max(1, round(2 ** (24 - c / 8))) for c in costs]
        there, whole = sum(w > 0 for w in weights), sum(weights)
        given = [w and 1 + w * (TOTAL - there) // whole for w in weights]
        given[given.index(max(given))] += TOTAL - sum(given)
        return given

    def coder(self, num_tables: int, num_integers: int) -> None:
        self.tables = [self.table() for _ in range(num_tables)]
        one = num_integers < NUMBERS["few integers: one context, one state"]
        one |= all(TOTAL in table for table in self.tables)
        self.states = self.take("<u4", 1 if one else NUMBERS["states of more"]).tolist()

    def symbol(self, column: int, table: int) -> int:
        x = self.states[column % len(self.states)]
        slot, start, frequencies = x % TOTAL, 0, self.tables[table]
        symbol = 0
        while start + frequencies[symbol] <= slot:
            start += frequencies[symbol]
            symbol += 1
        x = frequencies[symbol] * (x // TOTAL) + slot - start
        if x < LOWEST:
            x = LOWEST * x + int(self.take("<u2", 1)[0])
        self.states[column % len(self.states)] = x
        return symbol

    def end(self) -> None:
        assert set(self.states) == {LOWEST}

    def integers(self, rows: int, columns: int, image=None, offsets=None) -> np.ndarray:
        kinds = {int(row["stream"]): row["name"] for row in TABLES["stream"]}
        name, _, signed = kinds[int(self.take("u1", 1)[0])].partition(", ")
        if name == "plain":
            return self.take("<i2", rows * columns).reshape(rows, columns)
        if name == "neighbours":
            return self.neighbours(rows, columns, image, bool(signed))
        return self.classes(rows, columns, bool(signed), offsets)

    def classes(self, rows: int, columns: int, signed: bool, offsets) -> np.ndarray:
        (count,) = self.take("u1", 1).tolist()
        self.coder(2 + count, rows * columns)
        of_rows, of_columns = (
            [self.symbol(j, table) for j in range(n)] for table, n in enumerate((rows, columns))
        )
        last = NUMBERS["contexts of classes"] - 1
        both = itertools.product(set(of_rows), set(of_columns))
        occurring = sorted({min(last, sum(pair)) for pair in both})
        assert count == len(occurring) * (1 if offsets is None else 4)
        q = np.zeros((rows, columns), np.int64)
        for i, j in np.ndindex(rows, columns):
            table = 2 + occurring.index(min(last, of_rows[i] + of_columns[j]))
            if offsets is None:
                q[i, j] = self.symbol(j, table)
                continue
            p = int(offsets[i, j])
            s = self.symbol(j, table + len(occurring) * (p if p >= 0 else -1 - p))
            t = (s + 1) // 2 if s % 2 else -s // 2
            q[i, j] = t if p >= 0 else -t
        self.end()
        if offsets is None:
            large = q == ESCAPE
            q[large] = self.take("<u2", int(large.sum()))
            if signed:
                there = np.flatnonzero(q)
                signs = unpacked(self.take("u1", -(-len(there) // 8))[::-1], 1, len(there))
                q.reshape(-1)[there] *= 1 - 2 * signs
        assert self.at == len(self.raw)
        return q

    def neighbours(self, pixels: int, channels: int, image, signed: bool) -> np.ndarray:
        height, width = image
        occurring = np.flatnonzero(np.unpackbits(self.take("u1", 26)))
        self.coder(len(occurring), pixels * channels)
        q, errors, num_large = np.zeros((pixels, channels), np.int64), [], 0
        for i in range(pixels):
            line, column = i // width % height, i % width
            near = [i - 1 if column else None, i - width if line else None]
            near = [n for n in near if n is not None]
            corner = [i - width - 1] if column and line else near
            left, above = (near * 2)[:2] if near else (None, None)
            e = (
                15
                if left is None
                else min(14, size_of(4 * (errors[left] + errors[above]) // channels))
            )
            error = 0
            for j in range(channels):
                m = 0
                if left is not None:
                    a, b, c = (int(q[n, j]) for n in (left, above, corner[0]))
                    m = sorted((a, b, a + b - c))[1]
                context = 13 * e + (min(12, size_of(abs(m))))
                s = self.symbol(j, int(np.searchsorted(occurring, context)))
                if s == ESCAPE:
                    num_large += 1
                    (s,) = struct.unpack_from("<H", self.raw, len(self.raw) - 2 * num_large)
                d = -(s + 1) // 2 if s % 2 else s // 2
                q[i, j] = m + d if signed or s <= 2 * m else s
                error += abs(int(q[i, j]) - m)
            errors.append(error)
        self.end()
        assert self.at == len(self.raw) - 2 * num_large
        return q


def size_of(n: int) -> int:
    n = min(n, 127)
    return n if n < 4 else 2 * int(math.log2(n)) + int(f"{n:b}"[1])


def codes_of(raw: np.ndarray, count: int) -> list[Stream]:
    """Several codes, each behind its length."""
    raw, found = bytes(raw), []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        found.append(Stream(np.frombuffer(raw, "u1", length, 4)))
        raw = raw[4 + length :]
    assert len(found) == count
    return found


# -- it reads what links send ---------------------------------------------------------------------


def sent(spec: str, x: torch.Tensor, *, checked: bool = False) -> tuple[bytes, np.ndarray]:
    """A link's message, and what its own receiver makes of it, flat."""
    link = Link(parse(spec), boundary=0, direction="act", checked=checked)
    step = Step(5, True)
    there = link.encode(x, step, 0)
    raw = bytes(there.tolist())
    arrived = link.decode(there, TensorMeta.of(x), step, 0)
    assert field(raw, "version") == 3 and field(raw, "step") == 5 and field(raw, "status") == 0
    return raw, arrived.reshape(-1).numpy()


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_dense_message():
    x = some(4, 16, 64)
    raw, _ = sent("none", x)
    assert field(raw, "kind") == 0 and field(raw, "form") == 0
    text = "[((4, 1024), 'torch.float32')]"
    assert field(raw, "check") == zlib.crc32(text.encode())
    (elements,) = payload_of(raw, ("<f4", x.numel()))
    assert np.array_equal(elements, x.reshape(-1).numpy())


@pytest.mark.parametrize(
    ("keep", "k", "size"), [(0.1, 410, 271), (0.3, 1229, 512), (0.02, 82, 79), (1e-4, 1, 2)]
)
def test_a_selection(keep, k, size):
    x = some(4, 16, 64)
    raw, arrived = sent(f"topk:{keep}:scope=tensor", x)
    assert field(raw, "kind") == 1
    values, code = payload_of(raw, ("<f4", k), ("u1", size))
    said = np.zeros(x.numel(), np.float32)
    said[positions_of(code, x.numel(), k)] = values
    assert np.array_equal(said, arrived)


@pytest.mark.parametrize("width", [1, 3, 4, 7, 8])
def test_codes_of_any_width(width):
    x = some(4, 3, 7)
    raw, arrived = sent(f"quant:{width}", x)
    low, step, packed = payload_of(
        raw, ("<f4", 1), ("<f4", 1), ("u1", bits.packed_bytes(84, width))
    )
    said = unpacked(packed, width, x.numel()).astype(np.float32) * step + low
    assert np.array_equal(said, arrived)


def test_signs_and_columns_and_factors():
    x = some(4, 16, 64)
    raw, arrived = sent("sign", x)
    scale, packed = payload_of(raw, ("<f4", 1), ("u1", 512))
    assert np.array_equal(np.where(unpacked(packed, 1, 4096), scale, -scale), arrived)
    raw, arrived = sent("lowrank:4", x)
    p, q = payload_of(raw, ("<f4", 256), ("<f4", 256))
    said = lowrank.outer_sum(*(torch.from_numpy(f.reshape(64, 4).copy()) for f in (p, q)))
    assert np.allclose(said.reshape(-1), arrived, rtol=1e-6, atol=1e-6)
    raw, arrived = sent("lloyd:3:scale=tensor", x)
    scale, packed = payload_of(raw, ("<f4", 1), ("u1", 1536))
    book = np.array([float(Fraction(round(c * 2**16), 2**16)) for c in gaussian_centroids(3)])
    assert np.array_equal(book.astype(np.float32)[unpacked(packed, 3, 4096)] * scale, arrived)


@pytest.mark.parametrize(
    ("name", "image"),
    [("few", None), ("tokens", None), ("behind a ReLU", None), ("noise of many bits", None),
     ("outliers", None), ("images", (8, 8)), ("images with signs", (8, 8)),
     ("images of fine steps", (8, 8))],
)  # fmt: skip
def test_a_step(name, image):
    """Each kind of stream; with lowest and above, T tokens of C channels."""
    tokens, channels, step = (6, 20, 0.5) if name == "few" else (72, 64, 0.5)
    x = some(tokens, channels)
    if name == "behind a ReLU":
        x = x.relu() * torch.linspace(0.1, 8, channels)
    if name == "noise of many bits":
        step = 0.001
    if name == "images of fine steps":
        step = 0.005
    if name == "outliers":
        step = 0.02
        x[::9, 5] *= 3000
    if image:
        x = some(2, 8, 3, 3).repeat_interleave(3, 2).repeat_interleave(3, 3)[:, :, :8, :8]
        x = torch.cat([x, x + 0.1], 1).repeat(1, 3, 1, 1)
        x = x if "signs" in name else x.relu()
        tokens, channels = 2 * 64, 48
    raw, arrived = sent(f"step:{step}:scale=tensor", x)
    assert field(raw, "form") == 1 and field(raw, "length") == len(raw)
    lowest, above, elements = codes_of(payload_of(raw, ("u1", -1))[0], 3)
    kind = elements.raw[0]
    wanted = {
        "behind a ReLU": 5,
        "images": 7,
        "images of fine steps": 7,
        "images with signs": 6,
        "noise of many bits": 0,
    }
    assert kind == wanted.get(name, 4)
    k = int(lowest.integers(1, 1)[0, 0] + above.integers(1, 1)[0, 0]) - 1
    q = elements.integers(tokens, channels, image)
    if image:
        q = q.reshape(2, 8, 8, channels).transpose(0, 3, 1, 2)
    assert np.abs(q).max() > (300 if step < 0.1 else 0)
    unit = np.float32(step * 2 ** (k / 4))
    assert np.array_equal(q.reshape(-1).astype(np.float32) * unit, arrived)


def test_a_step_of_each_token_with_means():
    x = some(40, 24) * torch.logspace(-1, 1, 40)[:, None] + torch.linspace(-2, 2, 24)
    x[3] = 0
    raw, arrived = sent("step:0.25:centre=true", x)
    lowest, above, means, elements = codes_of(payload_of(raw, ("u1", -1))[0], 4)
    over = above.integers(1, 40)[0]
    k = lowest.integers(1, 1)[0, 0] + over - 1
    units = np.where(over > 0, 0.25 * 2.0 ** (k / 4), 0).astype(np.float32)[:, None]
    stands_out = (k > np.sort(k[over > 0])[(over > 0).sum() // 2] + 12) | (over == 0)
    m = means.integers(1, 24)[0].astype(np.float32) / 4 * ~stands_out[:, None]
    q = elements.integers(40, 24).astype(np.float32)
    assert over[3] == 0 and np.allclose((q + m) * units, arrived.reshape(40, 24), rtol=1e-6)


def test_a_stream_under_a_dither():
    v = torch.rand(80, 64, generator=torch.Generator().manual_seed(1)).numpy() - 0.5
    z = some(80, 64).numpy() * np.linspace(0.05, 0.6, 64)
    q, offsets = np.rint(z + v).astype(np.int16), np.floor(8 * v).astype(np.int8)
    raw = entropy.encode(q, None, offsets)
    assert raw[0] == 8
    assert np.array_equal(Stream(raw).integers(80, 64, offsets=offsets), q)


def test_lines_of_a_vector():
    q = (some(1, 5000) * 2).round().to(torch.int16).numpy()
    rows = -(-5000 // NUMBERS["integers of a line"])
    columns = -(-5000 // rows)
    read = Stream(entropy.encode(q)).integers(rows, columns)
    assert np.array_equal(read.reshape(-1)[:5000], q[0]) and not read.reshape(-1)[5000:].any()


def test_slices(monkeypatch):
    monkeypatch.setattr(threads, "_ELEMENTS", 2000)  # as millions would take minutes here
    q = (some(100, 64) * 2).round().to(torch.int16).numpy()
    stream = Stream(entropy.encode(q))
    assert stream.take("u1", 1)[0] == 9
    lengths, found = stream.take("<u4", 6400 // 2000).tolist(), []
    for length in lengths:
        rows = 100 * (len(found) + 1) // 3 - 100 * len(found) // 3
        found.append(Stream(stream.take("u1", length)).integers(rows, 64))
    assert stream.at == len(stream.raw) and np.array_equal(np.concatenate(found), q)


@pytest.mark.parametrize("spec", ["none", "topk:0.1", "step:0.5"])
def test_the_sum_of_a_checked_message(spec):
    raw, _ = sent(spec, some(7, 33), checked=True)
    assert field(raw, "form") == 3 and field(raw, "length") == len(raw)
    offset, size, _ = FIELDS["sum"]
    both = struct.pack("<QQ", sum_of(raw[:offset]), sum_of(raw[offset + size :]))
    assert field(raw, "sum") == sum_of(both)


def test_sums_go_over_blocks_and_last_bytes():
    raw = some(1, 17000, seed=3).to(torch.float64).view(torch.uint8)[0, :-3]
    assert sum_of(bytes(raw.tolist())) == int(bit_sum.bit_sum(raw)) % 2**64


def test_tables_of_the_page_are_those_that_are_sent():
    """All curves, and an explicit table."""
    for number, curve in enumerate(frequencies._CURVES):
        assert_as_the_page_says(number, curve[: 1 + number % 256])
    assert_as_the_page_says(len(frequencies._CURVES), np.array([255, 255, 3, 255, 40, 9], np.uint8))


def assert_as_the_page_says(curve, costs):
    """One table: what is sent of it says the frequencies that both ends make."""
    tables = frequencies.Tables(np.array([curve]), costs[None], np.zeros(1))
    read = Stream(np.frombuffer(tables.to_bytes(), "u1")).table()
    found = np.diff(frequencies.starts_of(tables.costs)[0])
    assert np.array_equal(found[-len(read) :], read) and not found[: -len(read)].any(), curve
