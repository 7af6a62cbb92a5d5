"""The one error type of kvatlas, and the codes it carries.

An error is part of the interface: a scheduler retries on some, a peer is told others, a
test asserts them. So each has a stable `Code`, and each message says what is wrong, what
was got, and what to do.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Every reason for an `AtlasError`, with what is wrong in general. Codes are never renamed.

    >>> Code("overlap") is Code.OVERLAP, Code.OVERLAP.problem
    (True, 'Two parts, or two coordinates, share bytes')
    """

    problem: str

    def __new__(cls, value: str, problem: str) -> Code:
        """A code is its text; what is wrong in general comes along."""
        code = str.__new__(cls, value)
        code._value_, code.problem = value, problem
        return code

    UNKNOWN_AXIS = "unknown_axis", "There is no such axis"
    BAD_AXES = "bad_axes", "Axes are missing, named twice, or without a size and stride each"
    BAD_ORDER = "bad_order", "A layout must name each of L, B, H, N, C exactly once"
    NOT_AN_INTEGER = "not_an_integer", "A size, stride, offset or index is not a whole number"
    BAD_SIZE = "bad_size", "A size is less than 1"
    NEGATIVE = "negative", "An offset or a stride is negative"
    OVERFLOW = "overflow", "An address is past 2^63"
    OUT_OF_RANGE = "out_of_range", "A coordinate, id or slot does not exist"
    OUT_OF_BOUNDS = "out_of_bounds", "Bytes lie outside the buffer"
    OVERLAP = "overlap", "Two parts, or two coordinates, share bytes"
    UNDECIDED = "undecided", "Whether axes overlap cannot be decided: they are too tangled"
    TOO_MANY = "too_many", "That is more than any machine can want at once"
    HOLE = "hole", "Bytes belong to no part and are not named as padding"
    MISALIGNED = "misaligned", "A part, page or block does not start at a multiple of the alignment"
    NOT_DIVISIBLE = "not_divisible", "A size is not a multiple of what divides it"
    NOT_FOLDABLE = "not_foldable", "Two axes do not fold: there are gaps between them"
    NOT_CONTIGUOUS = "not_contiguous", "Cells that must be contiguous have gaps in this layout"
    SPLIT_ELEMENT = "split_element", "The bytes of an element are not neighbours"
    UNLIKE_PLACEMENTS = "unlike_placements", "The two sides have different sizes"
    UNKNOWN_DTYPE = "unknown_dtype", "There is no such dtype"
    NOT_REPRESENTABLE = "not_representable", "A number cannot be written in this dtype"
    UNKNOWN_FIELD = "unknown_field", "The page has no such field"
    BAD_FIELD = "bad_field", "A field's axes and shard do not fit together"
    PAGE_TOO_SMALL = "page_too_small", "A page is smaller than its cells"
    PADDING_INSIDE_PAGE = "padding_inside_page", "A padded page is not contiguous in this layout"
    BAD_TENSOR = "bad_tensor", "A tensor has the wrong shape, dtype or strides"
    BAD_RANK = "bad_rank", "There is no such rank"
    TP_HEADS = "tp_heads", "Heads or groups neither divide evenly over the ranks nor repeat evenly"
    TP_WHOLE = "tp_whole", "A field that cannot be sharded or replicated needs tp 1"
    BAD_SPEC = "bad_spec", "A layer cannot cache what this spec says"
    NO_CACHE = "no_cache", "There is nothing to cache"
    UNREADABLE = "unreadable", "A file cannot be read, or is not what it should be"
    UNWRITABLE = "unwritable", "A file cannot be written"
    BAD_CONFIG = "bad_config", "A config value has the wrong type, length or range"
    MISSING_KEY = "missing_key", "The config lacks a key that its family needs"
    UNKNOWN_ARCHITECTURE = "unknown_architecture", "The architecture is unknown"
    UNKNOWN_MODEL = "unknown_model", "No model of that name"
    NO_HUB = "no_hub", "The model hub cannot be reached"
    UNKNOWN_ENGINE = "unknown_engine", "There is no such engine"
    UNKNOWN_BACKEND = (
        "unknown_backend",
        "There is no such backend, or no layer of the model uses it",
    )
    BACKEND_REFUSES = "backend_refuses", "The backend does not take this block size or cache dtype"
    BAD_TOPOLOGY = "bad_topology", "Heads, groups or layers do not divide over the ranks"
    LAYOUT_REFUSED = "layout_refused", "This layout does not suit all layers and backends"
    PAGES_NOT_UNIFIED = "pages_not_unified", "Pages of unlike layers cannot be made equal"
    NOT_ENOUGH_MEMORY = "not_enough_memory", "Not enough memory"
    UNKNOWN_GPU = "unknown_gpu", "No GPU of that name is known"
    WEIGHTS_TOO_LARGE = "weights_too_large", "The weights leave no memory for a cache"
    CONTRADICTORY = "contradictory", "Two things that were asked for contradict each other"
    BAD_PACK = "bad_pack", "The pack does not suit this model"
    BAD_PLAN = "bad_plan", "The plan is not sound"
    UNKNOWN_POLICY = "unknown_policy", "There is no such policy"
    UNKNOWN_LAYER = "unknown_layer", "The plan has no such layer"
    BAD_QUANTITY = "bad_quantity", "This is not a number with an optional unit"
    UNLIKE_MODELS = "unlike_models", "The two plans cache different models"
    UNLIKE_LAYERS = "unlike_layers", "A layer keeps different things in the two plans"
    UNLIKE_DTYPES = "unlike_dtypes", "A layer is kept in different dtypes in the two plans"
    BAD_CONVERSION = (
        "bad_conversion",
        "The conversion that was asked for is not the one between the two plans",
    )
    CANNOT_CONVERT = "cannot_convert", "A layer's content cannot be converted"
    MISSING_SCALES = "missing_scales", "A format with one scale for the tensor was given none"
    UNLIKE_CONVERSIONS = "unlike_conversions", "The two ends did not agree on one conversion"
    MISSING_LAYERS = "missing_layers", "One plan has layers that the other lacks"
    NOT_A_SOURCE = "not_a_source", "The source rank does not hold what was chosen from it"
    BAD_TOKENS = "bad_tokens", "The token range is reversed or past the greatest length"
    MISSING_BLOCKS = "missing_blocks", "A block table is missing or does not cover the tokens"
    TWICE = "twice", "A block is named twice"
    DEADLINE = "deadline", "The deadline passed"
    PEER_LOST = "peer_lost", "Peer disconnected"
    WIRE_FAILED = "wire_failed", "The transport failed"
    BAD_HANDSHAKE = "bad_handshake", "The peer sent a malformed or contradictory message"
    BAD_SIGNATURE = "bad_signature", "The two ends do not share a secret"
    BAD_SECRET = "bad_secret", "A shared secret is not 16 bytes or more"
    UNPROTECTED = "unprotected", "A node without a secret would be open to the network"
    BUSY = "busy", "The peer has too much to do"
    UNLIKE_VERSIONS = "unlike_versions", "The peer speaks another version of the protocol"
    UNKNOWN_SESSION = "unknown_session", "The peer knows no such session"
    UNKNOWN_REQUEST = "unknown_request", "The request is neither offered nor expected"
    BLOCKS_IN_USE = "blocks_in_use", "The node already uses some of these blocks"
    DIFFERENT_IDENTITY = (
        "different_identity",
        "The two ends compute their caches with different weights or settings",
    )
    LEASE_EXPIRED = "lease_expired", "The lease ended before the last byte was read"
    CHECKSUM = "checksum", "Bytes were changed: their checksums differ"
    CANCELLED = "cancelled", "The transfer was cancelled"
    MISSING_EXTRA = "missing_extra", "A library is not installed"
    BAD_TRACE = "bad_trace", "A trace contradicts itself, or is in no form that is known"
    NO_BLOCKS = "no_blocks", "The pool has no free block"
    ENGINE_REFUSES = "engine_refuses", "The engine's layers, masks or padding cannot be served"
    CANNOT_TAKE_BACK = "cannot_take_back", "What the tokens saw is no longer kept"
    WRONG_DEVICE = (
        "wrong_device",
        "Tensors are on different devices, or out of a kernel's reach",
    )
    NO_KERNEL = "no_kernel", "No kernel is written for this"


LONGEST_TEXT = 1_000
"""Characters of each part of a message: what is wrong, what was got, what to do."""


class AtlasError(ValueError):
    """What is wrong, what was got, what to do, and a stable code.

    Without a `problem` of its own an error says its code's. Text that is longer than
    `LONGEST_TEXT` is cut, since what was got may come from a stranger.

    >>> from kvatlas import Layout
    >>> try:
    ...     Layout("LBNHH")
    ... except AtlasError as error:
    ...     print(error.code, error.got)
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    bad_order 'LBNHH'
    A layout must name each of L, B, H, N, C exactly once. Got 'LBNHH'.
    Write an order such as 'LBNHC', or one of the aliases NHD and HND. [bad_order]
    """

    def __init__(self, code: Code, problem: str = "", *, got: object, hint: str) -> None:
        self.code = code
        self.problem = _cut(problem) or code.problem
        text = str(got)
        self.got = _cut(text) if len(text) > LONGEST_TEXT else got
        self.hint = _cut(hint)
        end = "" if hint.endswith("?") else "."
        super().__init__(f"{self.problem}. Got {self.got}. {self.hint}{end} [{code}]")

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call __init__ with the message alone.
        return (_rebuild, (self.code, self.problem, self.got, self.hint))


def _cut(text: str) -> str:
    """The text, or its beginning and how long it was."""
    if len(text) <= LONGEST_TEXT:
        return text
    told = f"... ({len(text):,} characters)"
    return text[: LONGEST_TEXT - len(told)] + told


def _rebuild(code: Code, problem: str, got: object, hint: str) -> AtlasError:
    return AtlasError(code, problem, got=got, hint=hint)


class MissingExtraError(AtlasError, ImportError):
    """A library that an extra brings is not installed; `note` is added to the hint."""

    def __init__(self, library: str, extra: str, note: str = "") -> None:
        super().__init__(
            Code.MISSING_EXTRA,
            f"{library} is not installed",
            got=f"no module {library}",
            hint=f"Try: pip install 'kvatlas[{extra}]'{note}",
        )
        self.library, self.extra, self.note = library, extra, note

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingExtraError, (self.library, self.extra, self.note))
