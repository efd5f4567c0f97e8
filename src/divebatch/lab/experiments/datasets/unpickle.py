"""Reading a pickle of plain containers and numpy arrays of whole numbers, without running any code it names.

`pickle.loads` calls whatever a file asks for. This is a small reader of its own: `pickletools` takes the file apart,
the opcodes that plain data needs are carried out here, and everything else is an error. Of numpy's names only stand-ins
are reached, so that neither object arrays nor shapes without data behind them can be built. Protocols 2 to 5.

Why not `pickle.Unpickler` with a restricted `find_class`: that keeps names out, but bounds neither time nor memory. A
few bytes make it reserve gigabytes (the length of a BYTEARRAY8, the index of a LONG_BINPUT) or hash tuples that hold
themselves twice over, level by level, for ever. Opcodes would have to be checked one by one before it, with what is on
its stack, which is most of what stands here.

Here time and memory are bounded: by the bytes of the file, by the number of its opcodes, and by what may stand where. A
list holds numbers and text alone, a dict also lists and arrays, so nothing can be built that is larger unfolded than
the file allows, and every single opcode costs little.
"""

import math
import pickletools
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from divebatch.lab.experiments.datasets.dataset import Origin

MOST_BYTES = 2**30
"""The largest file that is read; the largest of the CIFAR sets has 155 million bytes."""
MOST_OPCODES = 2_000_000
"""A file of that size in CIFAR's form has 1.4 million of them, for the labels and the name of each image."""
LONGEST_TUPLE = 16
"""Tuples are shapes, arguments and states alone; numpy's states have up to nine items."""
LONGEST_KEY = 256
"""Of a dict, in characters: a key is compared with an equal one as often as a file names the two."""
MOST_COPIES = 4
"""How often a file's bytes may be copied into arrays and strings."""
WHOLE_NUMBERS = {f"{kind}{width}" for kind in "iu" for width in (1, 2, 4, 8)}
"""The types of array elements, as numpy writes them, that can be read."""


class RefusedError(Exception):
    """A pickle does or holds what it may not; becomes a DataError that also names the file."""


def read_pickle(path: Path, origin: Origin) -> Any:
    """Read what `path` holds; the byte strings of Python 2 come as str (latin-1), and so do all keys."""
    try:
        if path.stat().st_size > MOST_BYTES:
            _refuse(f"it has {path.stat().st_size} bytes, more than the {MOST_BYTES} that are read")
        pickled = path.read_bytes()
        return _Machine(MOST_COPIES * len(pickled)).run(pickled)
    except RefusedError as error:
        raise origin.damaged(path, str(error)) from error
    except Exception as error:  # a damaged file can go wrong at any place
        raise origin.damaged(
            path, f"cannot be read as a pickle ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _refuse(what: str) -> NoReturn:
    raise RefusedError(what)


# Stand-ins for what numpy writes into a pickle


class _Dtype:
    """Stands for numpy.dtype: made from a code like "u1", then told the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in WHOLE_NUMBERS:
            _refuse(f"an array of type {reprlib.repr(code)} cannot be read, only whole numbers")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            _refuse(f"a byte order is {reprlib.repr(state[1])}")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for numpy.ndarray: made empty, then told shape, type and bytes."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[Any] | None = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.values = _array(data, dtype, shape, "F" if is_fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    raw = _bytes(data)
    if not isinstance(dtype, _Dtype):
        _refuse("an array has no type")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        _refuse("an array has no shape")
    if math.prod(shape) * dtype.dtype.itemsize != len(raw):  # said better than numpy does
        _refuse(f"an array of shape {reprlib.repr(shape)} comes with {len(raw)} bytes")
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.values = _array(data, dtype, shape, order)
    return array


def _number(dtype: Any, data: Any) -> int:
    return int(_array(data, dtype, (1,), "C")[0])


def _encoded(text: str, encoding: str) -> bytes:
    """Stands for _codecs.encode, as which Python 3 writes bytes in protocol 2."""
    if encoding != "latin1":
        _refuse(f"bytes are encoded as {reprlib.repr(encoding)}")
    return text.encode(encoding)


def _bytes(data: Any) -> bytes:
    return data.encode("latin-1") if isinstance(data, str) else bytes(memoryview(data))


def _no_call(*_: Any) -> NoReturn:
    _refuse("numpy.ndarray is called directly")


_NUMPY: dict[str, Callable[..., Any]] = {
    "multiarray _reconstruct": _Array,
    "multiarray scalar": _number,
    "numeric _frombuffer": _array_from_buffer,
}
ADMITTED: dict[str, Callable[..., Any]] = {
    "numpy ndarray": _no_call,  # named as an argument only
    "numpy dtype": _Dtype,
    "_codecs encode": _encoded,
    **{f"numpy.{core}.{name}": stand_in for core in ("core", "_core") for name, stand_in in _NUMPY.items()},
}
"""The names a pickle may use, and what is called in their place."""


_PLAIN = (str, bytes, bytearray, int, float, type(None))
"""What a list may hold; a dict may hold lists and arrays too."""


class _Machine:
    """Carries out a pickle's opcodes on a stack."""

    def __init__(self, bytes_to_copy: int) -> None:
        self.bytes_to_copy = bytes_to_copy
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks set aside at each mark
        self.memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if number == MOST_OPCODES:
                _refuse(f"it has more than {MOST_OPCODES} opcodes")
            if opcode.name in _PUSHED:
                self.stack.append(argument)
            elif opcode.name in _OPCODES:
                _OPCODES[opcode.name](self, argument)
            elif opcode.name not in _IGNORED:
                _refuse(f"opcode {opcode.name} is not admitted in plain data")
        return _without_stand_ins(self.stack.pop())

    def check_protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            _refuse(f"it is of protocol {version}, and only 2 to 5 can be read")

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.put(len(self.memo))

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def make_tuple(self, size: int) -> None:
        items = [self.stack.pop() for _ in range(size)]
        self.push_tuple(items[::-1])

    def make_marked_tuple(self, _: Any) -> None:
        self.push_tuple(self.pop_mark())

    def push_tuple(self, items: list[Any]) -> None:
        """Tuples stand in tuples only as shapes do: a pyramid of shared ones would take for ever to hash or print."""
        if len(items) > LONGEST_TUPLE:
            _refuse(f"a tuple has {len(items)} items, more than any array needs")
        if any(isinstance(each, tuple) for inner in items if isinstance(inner, tuple) for each in inner):
            _refuse("tuples are nested deeper than any array needs")
        self.stack.append(tuple(items))

    def pop_arguments(self) -> tuple[Any, ...]:
        """Take the arguments of a call or a state. The same bytes may be named many times, and are copied each time."""
        arguments: tuple[Any, ...] = _of_type(tuple, self.stack.pop(), "in the place of arguments")
        self.bytes_to_copy -= sum(len(each) for each in arguments if isinstance(each, str | bytes | bytearray))
        if self.bytes_to_copy < 0:
            _refuse("it uses the same bytes again and again")
        return arguments

    def extend(self, items: list[Any]) -> None:
        """Lists hold no containers: a pyramid of shared ones would take for ever to unfold, to compare or to print."""
        target = _of_type(list, self.stack[-1], "in the place of a list")
        target.extend(_of_type(_PLAIN, item, "in a list") for item in items)

    def set_items(self, items: list[Any]) -> None:
        target = _of_type(dict, self.stack[-1], "in the place of a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Text only: tuples may take long to hash, and numbers can be chosen so that their hashes are all equal.
            if len(_of_type((str, bytes), key, "as the key of a dict")) > LONGEST_KEY:
                _refuse(f"a key of a dict has {len(key)} characters")
            target[key] = _of_type((*_PLAIN, list, _Array), value, "in a dict")

    def look_up(self, name: str) -> None:
        if name not in ADMITTED:
            asked = reprlib.repr(name.replace(" ", "."))
            _refuse(f"it asks for {asked}, which is not admitted: only arrays, numbers and text are")
        self.stack.append(ADMITTED[name])

    def look_up_from_stack(self, _: Any) -> None:
        name, module = (_of_type(str, self.stack.pop(), "in the place of a name") for _ in range(2))
        self.look_up(f"{module} {name}")

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop_arguments(), self.stack.pop()
        self.stack.append(function(*arguments))  # only the stand-ins can be called, of all that comes to the stack

    def build(self, _: Any) -> None:
        state = self.pop_arguments()
        self.stack[-1].set_state(state)


def _of_type(kind: type | tuple[type, ...], value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        _refuse(f"a {type(value).__name__} stands {where}")
    return value


def _without_stand_ins(value: Any) -> Any:
    """Arrays for their stand-ins, one level deep: what the datasets need."""
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, _Array) and value.values is None:
        _refuse("an array has no content")
    return value.values if isinstance(value, _Array) else value


def _text(key: Any) -> Any:
    return key.decode("latin-1") if isinstance(key, bytes) else key


_IGNORED = {"FRAME", "STOP"}
_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""Opcodes that carry their value with them."""
_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.check_protocol,
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "TUPLE": _Machine.make_marked_tuple,
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.look_up,
    "STACK_GLOBAL": _Machine.look_up_from_stack,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
