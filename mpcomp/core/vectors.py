"""Eight numbers at a time, in loops that are `compiled`.

numba takes numbers one by one, and LLVM finds vectors only in loops whose numbers stay where they
are. Some do not: of eight states that read a stream, only some take a word, and they take the next
ones. A step with such moves is a function of `Values` and `Memory`:

    @vectorized(results=1)
    def take_words(words, at, states):
        x = states.load(0)
        needs = x < LOWEST
        states.store(0, needs.choose(x << 16 | needs.expand(words.load(at).to(32)), x))
        return at + needs.count()

A compiled function calls it with arrays and whole numbers. It runs once for each of their types,
and what it says becomes machine code: its own ``for`` and ``if`` are of Python's numbers. All
numbers are without signs, and overflow as numpy's do. LLVM makes them of what a processor has, so
that a processor without vectors has the same numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from mpcomp.core.compiled import content_of

__all__ = ["EIGHT", "Mask", "Memory", "Values", "vectorized"]

#: Numbers of a vector.
EIGHT: Final = 8


class Values:
    """Eight whole numbers, or a single one, as a place in an array is.

    Numbers of Python that an operation takes beside them become of their type.

    Args:
        builder: of llvmlite, which writes the code.
        value: of LLVM.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    def __add__(self, other: Values | int) -> Values:
        return self._by("add", other)

    def __sub__(self, other: Values | int) -> Values:
        return self._by("sub", other)

    def __rsub__(self, other: int) -> Values:
        return self._of(other)._by("sub", self)

    def __mul__(self, other: Values | int) -> Values:
        return self._by("mul", other)

    def __and__(self, other: Values | int) -> Values:
        return self._by("and_", other)

    def __or__(self, other: Values | int) -> Values:
        return self._by("or_", other)

    def __xor__(self, other: Values | int) -> Values:
        return self._by("xor", other)

    def __lshift__(self, bits: Values | int) -> Values:
        return self._by("shl", bits)

    def __rshift__(self, bits: Values | int) -> Values:
        return self._by("lshr", bits)

    def __lt__(self, other: Values | int) -> Mask:
        return Mask(self.builder, self.builder.icmp_unsigned("<", *self._both(other)))

    def __gt__(self, other: Values | int) -> Mask:
        return Mask(self.builder, self.builder.icmp_unsigned(">", *self._both(other)))

    def __floordiv__(self, other: Values) -> Values:
        """Whole quotients of 32 bits, exact where they are below 2^31: by fractions of 53 bits."""
        of_fractions = _vector(ir.DoubleType())
        a, b = (self.builder.uitofp(one, of_fractions) for one in self._both(other))
        return self._made(self.builder.fptosi(self.builder.fdiv(a, b), self.value.type))

    def to(self, bits: int) -> Values:
        """Eight numbers in so many bits; those above are lost."""
        before, after = self.value.type.element, ir.IntType(bits)
        change = self.builder.trunc if bits < before.width else self.builder.zext
        return self if bits == before.width else self._made(change(self.value, _vector(after)))

    def onwards(self) -> Values:
        """Eight numbers of 32 bits, from this single one on."""
        build, of_eight = self.builder, _vector(ir.IntType(32))
        first = build.trunc(self.value, ir.IntType(32))
        undefined = ir.Constant(of_eight, ir.Undefined)
        at_first = build.insert_element(undefined, first, _int32(0))
        all_alike = build.shuffle_vector(at_first, undefined, ir.Constant(of_eight, None))
        return self._made(build.add(all_alike, ir.Constant(of_eight, list(range(EIGHT)))))

    def moved(self, places: Values) -> Values:
        """The number of each place, below eight."""
        build, moved = self.builder, self._undefined()
        for n in range(EIGHT):
            place = build.extract_element(places.value, _int32(n))
            moved = build.insert_element(moved, build.extract_element(self.value, place), _int32(n))
        return self._made(moved)  # which LLVM makes one instruction of, where there is one

    def _undefined(self) -> Any:
        return ir.Constant(self.value.type, ir.Undefined)

    def _made(self, value: Any) -> Values:
        return Values(self.builder, value)

    def _by(self, operation: str, other: Values | int) -> Values:
        return self._made(getattr(self.builder, operation)(*self._both(other)))

    def _both(self, other: Values | int) -> tuple[Any, Any]:
        return self.value, self._of(other).value

    def _of(self, other: Values | int) -> Values:
        """Numbers of this type."""
        if isinstance(other, Values):
            return other
        number: Any = other
        if isinstance(self.value.type, ir.VectorType):
            number = [other] * EIGHT
        return self._made(ir.Constant(self.value.type, number))


class Mask:
    """A mask: of eight numbers some are meant, and others are not.

    Args:
        builder: of llvmlite.
        value: of LLVM, eight bits.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    def count(self) -> Values:
        """The number of the meant ones."""
        return Values(self.builder, self.builder.ctpop(self._number()))

    def choose(self, some: Values, others: Values) -> Values:
        """The numbers of ``some`` where they are meant, of ``others`` elsewhere."""
        return Values(self.builder, self.builder.select(self.value, some.value, others.value))

    def expand(self, values: Values) -> Values:
        """The first numbers at the places that are meant, in order; elsewhere any."""
        return values.moved(self._places("expand"))

    def compress(self, values: Values) -> Values:
        """The numbers that are meant, in order, as the last ones; before them any."""
        return values.moved(self._places("compress"))

    def _number(self) -> Any:
        """A bit of each."""
        bits = self.builder.bitcast(self.value, ir.IntType(EIGHT))
        return self.builder.zext(bits, ir.IntType(64))

    def _places(self, name: str) -> Values:
        """The place that each number comes from, by a table of all masks."""
        module = self.builder.module
        of_table = ir.ArrayType(ir.IntType(8), _MOVES[name].size)
        full_name = f"mpcomp.{name}"
        table = module.globals.get(full_name)
        if table is None:
            table = ir.GlobalVariable(module, of_table, full_name)
            table.linkage, table.global_constant = "internal", True
            table.initializer = ir.Constant(of_table, bytearray(_MOVES[name].tobytes()))
        first = self.builder.bitcast(table, ir.IntType(8).as_pointer())
        at = Values(self.builder, self._number()) * EIGHT
        return Memory(self.builder, first, 8).load(at).to(32)


class Memory:
    """The numbers of an array, without its ends being looked at.

    Args:
        builder: of llvmlite.
        first: of LLVM, the address of the first number.
        bits: of a number.
    """

    def __init__(self, builder: Any, first: Any, bits: int) -> None:
        self.builder = builder
        self.first = first
        self.bits = bits

    def load(self, at: Values | int) -> Values:
        """The eight numbers from a place on."""
        return Values(self.builder, self.builder.load(self._eight(at), align=self.bits // 8))

    def store(self, at: Values | int, values: Values) -> None:
        """Puts eight numbers there, of the array's bits."""
        self.builder.store(values.value, self._eight(at), align=self.bits // 8)

    def gather(self, places: Values) -> Values:
        """The number of each of eight places."""
        build = self.builder
        of = _vector(ir.IntType(self.bits))
        gathered = ir.Constant(of, ir.Undefined)
        for n in range(EIGHT):  # one by one, which is no slower than an instruction for all
            place = build.zext(build.extract_element(places.value, _int32(n)), ir.IntType(64))
            number = build.load(build.gep(self.first, [place]))
            gathered = build.insert_element(gathered, number, _int32(n))
        return Values(build, gathered)

    def _eight(self, at: Values | int) -> Any:
        place = at.value if isinstance(at, Values) else ir.Constant(ir.IntType(64), at)
        address = self.builder.gep(self.first, [place])
        return self.builder.bitcast(address, _vector(ir.IntType(self.bits)).as_pointer())


def vectorized(results: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of `Memory` and `Values` one of arrays and whole numbers.

    It takes a `Memory` for each array, whose numbers are whole and lie one behind the other, and
    `Values` of 64 bits for each number.

    Args:
        results: how many numbers of 64 bits it returns: one, or a tuple of several.
    """

    def of_step(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def machine_code() -> Any:
            return _intrinsic(step, results)

        @functools.wraps(step)
        def call(*args: Any) -> Any:
            raise TypeError(f"{step.__name__} is called by compiled functions alone")

        call.machine_code = machine_code  # type: ignore[attr-defined]
        call.content = lambda: (content_of(step), _own_content())  # type: ignore[attr-defined]
        return call

    return of_step


def _intrinsic(step: Callable[..., Any], results: int) -> Any:
    """A step as numba calls it."""
    import numba.core  # which those who code nothing do not wait for
    from numba.extending import intrinsic

    types: Any = numba.core.types
    one = types.uint64
    returned = one if results == 1 else types.UniTuple(one, results)

    def typed(context: Any, *arguments: Any) -> tuple[Any, Any]:
        taken = [kind if isinstance(kind, types.Array) else one for kind in arguments]

        def code(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            wrapped = [
                Memory(
                    builder,
                    context.make_array(kind)(context, builder, value).data,
                    kind.dtype.bitwidth,
                )
                if isinstance(kind, types.Array)
                else Values(builder, value)
                for kind, value in zip(signature.args, values, strict=True)
            ]
            made = step(*wrapped)
            if results == 1:
                return made.value
            return context.make_tuple(builder, returned, [number.value for number in made])

        return returned(*taken), code

    parameters = inspect.signature(step).parameters.values()
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typed.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(typed)


def _own_content() -> list[Any]:
    """The code of these classes: of a function that was kept, it must be the same."""
    methods = (each for kind in (Values, Mask, Memory) for each in vars(kind).values())
    return [content_of(each) for each in methods if inspect.isfunction(each)]


def _vector(element: Any) -> Any:
    return ir.VectorType(element, EIGHT)


def _int32(number: int) -> Any:
    return ir.Constant(ir.IntType(32), number)


def _moves() -> dict[str, NDArray[np.int8]]:
    """The place that each of eight numbers comes from, by mask: int8 [256, 8]."""
    moves = {name: np.zeros((1 << EIGHT, EIGHT), np.int8) for name in ("expand", "compress")}
    for mask in range(1 << EIGHT):
        meant = np.flatnonzero(mask >> np.arange(EIGHT) & 1)
        moves["expand"][mask, meant] = np.arange(len(meant))
        moves["compress"][mask, EIGHT - len(meant) :] = meant
    return moves


_MOVES: Final = _moves()
