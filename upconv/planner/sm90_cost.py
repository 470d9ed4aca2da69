"""What the Hopper kernel costs: work of one unit in, cycles out.

The constants are fitted by `benchmarks/fit_sm90.py` to tilings measured on an H200: 19,771 runs of
354 layers, forward, the input's gradient and channels_last. What counts is that the tiling they
pick is fast: on average it is 2 % slower than the fastest one measured. (Least squares of all
times gave 3 to 5 %.) The standard deviation is 11 %, 17 % with channels_last. On drawn layers that
nothing was fitted to it is 3 to 4.5 % slower. Split float32: 5,098 runs of 269 layers, 1 % slower.
The terms add up because the stages of the pipeline share the port of shared memory and wait for
each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CLOCK_MHZ = 1700.0
"""Sustained under tensor load on an H200."""
DRAM_BYTES = 18.4
"""Bytes a cycle: 4.27 TB/s copy rate, for one of 132 multiprocessors at CLOCK_MHZ."""

COLUMNS = ("TF32", "16 bits", "TF32 channels_last", "16 bits channels_last", "split float32")
CYCLES = {
    "operands": (0.82, 0.958, 1.03, 0.852, 0.986),
    "margins": (0.0111, 0.0126, 0.0, 0.0, 0.0812),
    "brought": (0.0256, 0.0215, 0.0359, 0.0171, 0.0097),
    "slices": (174.0, 225.0, 624.0, 719.0, 605.0),
    "boxes": (102.0, 55.8, 0.0, 0.0, 53.1),
    "starved": (68.3, 82.3, 0.0, 0.0, 110.0),
    "row_chunks": (102.0, 79.5, 0.0, 0.0, 160.0),
    "row_boxes": (14.5, 31.9, 0.0, 0.0, 1.34),
    "stepped": (0.00106, 0.0145, 0.0, 0.0, 0.0242),
    "turns": (382.0, 588.0, 521.0, 360.0, 136.0),
    "stored": (0.00914, 1.04e-06, 0.0215, 0.0251, 0.00205),
    "segments": (2.42, 3.96, 0.0, 0.0, 2.5),
    "strip_segments": (0.681, 1.7, 0.0, 0.0, 1.96),
    "cut": (2.44, 3.47, 0.0, 0.0, 10.1),
    "ragged": (2.93, 0.548, 0.0, 0.0, 4.5),
    "vectors": (0.184, 0.0952, 0.0, 0.0, 0.0389),
    "pieces": (0.0, 0.0, 0.252, 2.7, 0.0),
    "bare_stores": (0.00519, 0.0246, 0.00781, 0.0134, 0.0),
    "bare_segments": (0.758, 0.00752, 0.0, 0.0, 0.0),
    "paired": (0.0378, 0.0416, 0.0, 0.0, 0.0),
    "lines": (0.94, 0.822, 0.0, 0.0, 0.776),
    "weights": (0.00733, 0.00599, 0.000546, 0.00762, 0.0126),
    "shallow": (21.8, 27.6, 5.93, 0.924, 35.1),
    "gathered": (1.0, 1.0, 0.493, 0.43, 3.95),
    "unit": (902.0, 919.0, 5430.0, 1750.0, 4320.0),
    "start": (29700.0, 29800.0, 32900.0, 31700.0, 38600.0),
}
"""For each unit of the `UnitWork` field of that name; "unit" is what every unit costs besides, and
"start" what nothing hides: the launch (5 us with 25 KB of parameters), the code's way from memory,
the first slice and the last store."""
CONSTANTS = tuple({name: row[i] for name, row in CYCLES.items()} for i in range(len(COLUMNS)))
GATHER_CYCLES = (0.058, 0.1, 1.2)
"""For each byte of a tile that the loaders copy by themselves instead of TMA: 16 bytes at a time, 4
bytes, one element of 16 bits."""
STEPPED_GATHER = 1.5
"""So many times that where columns are taken with a step. All from what was left of backward passes
on an H200 without the weight's gradient and the bias's, not from runs of their own: 2 to 3.5 times
what TMA takes on kb57 and kb71, 5 to 7 in TF32, 35 to 50 in BF16 on kb77_3d, kb79_1d and kb81."""
LINE_STAGED, LINE_VECTOR = 0.25, 0.65
"""Stores by lines, of more than two width phases or few channels: cycles for each accumulator, used
or not, and for each vector written. Fitted to 60 tilings of kb75, kb81, fsrcnn, kb72_3d and
hifigan1_1d beside the constants above (`h200-line-tilings-2026-11-15.jsonl`), standard deviation
8.7 %; the width of a vector hardly counts, so the bytes do not."""
LINE_SHIFTED = 0.45
"""For each accumulator where lines begin anywhere in 16 bytes and have more than two width phases:
kb81, expected at 0.42 and 0.33 ms with this, took 0.44 in TF32 and 0.33 in BF16. kb79_1d, which has
two, was expected at 0.46 and 0.33 without and took 0.57 and 0.32."""
PARTIAL_SECTOR = 3.0
"""L2 takes about 55 G parts of sectors a second, a third of what it takes of whole ones."""
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, 6 to 15 us where the weight is not frozen."""


def gathering_cycles(copy: int, step: int) -> float:
    """For each byte of a tile, what it takes where TMA does not bring it."""
    if copy >= len(GATHER_CYCLES):
        return 0.0
    return GATHER_CYCLES[copy] * (STEPPED_GATHER if step > 1 else 1.0)


def line_cycles(staged: float, vectors: float, shifted: bool) -> float:
    """Of stores by lines. `shifted`: several width phases of lines that begin anywhere."""
    return staged * (LINE_SHIFTED if shifted else LINE_STAGED) + vectors * LINE_VECTOR


@dataclass(frozen=True)
class UnitWork:
    """What the stages of the pipeline have to do for one unit of work."""

    operands: float
    """Reads of shared memory, 128 bytes each, for the operands of the WGMMAs. One of 64 rows and N
    columns takes N / 2 cycles and 16 + N / 4 such reads; the port of shared memory is what limits:
    the reads predict better than the cycles."""
    margins: float
    """Bytes of the tile that strips have between them; what lies in the tile once is `brought`."""
    brought: float
    """Bytes that come to shared memory for it: of TMA boxes, or of the tile itself."""
    slices: float
    boxes: float
    """TMA boxes, or chunks of several, that loaders wait for and give back."""
    starved: float
    """Boxes that are loaded with only one other in the ring: too few to hide the memory's delay."""
    row_chunks: float
    row_boxes: float
    """Chunks that come in several boxes, of every few rows and channels; and these boxes."""
    stepped: float
    """Bytes of a tile that is every so many-th column of its boxes, times the lanes but one that
    read from the same bank."""
    turns: float
    """Turns of the consumers at the tensor cores; where float32 is split, additions to the sums."""
    stored: float
    """Bytes written."""
    segments: float
    """Pieces of output rows that are written in one go, with margins between them."""
    strip_segments: float
    """The same where rows lie in strips, without margins: no lane idles. Of lines as well."""
    cut: float
    """Further pieces, since staging takes so many columns at a time, whatever rows they are of."""
    ragged: float
    """Segments that begin or end within a sector of 32 bytes."""
    vectors: float
    """Elements, pairs or whole 16 bytes, whatever a lane writes at a time."""
    pieces: float
    """channels_last: 16 channels of a pixel."""
    bare_stores: float
    """Bytes written while no other consumer multiplies: the consumers take no turns."""
    bare_segments: float
    """The same, pieces of output rows."""
    paired: float
    """Bytes written by both consumers together, who meet for it."""
    lines: float
    """Stores by lines, which `stored` and `segments` leave out: cycles by `line_cycles`."""
    weights: float
    """Bytes of packed weights streamed from L2."""
    shallow: float
    """Weight blocks that come through a ring of few stages."""
    gathered: float = 0.0
    """Filling the tile where TMA does not do it: cycles by `gathering_cycles`."""
    constants: dict[str, float] = field(default_factory=lambda: CONSTANTS[0], repr=False)

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by stage, in words that `explain` prints."""
        cost = {name: each * getattr(self, name, 0.0) for name, each in self.constants.items()}
        split = self.constants is CONSTANTS[-1]
        parts = {
            "the tensor cores": ("operands",),
            "filling the tile": FILLING,
            "additions to the sums" if split else "turns of the consumers": ("turns",),
            "the stores": STORING,
            "the weights": ("weights", "shallow"),
        }
        return {words: sum(cost[name] for name in names) for words, names in parts.items()}

    @property
    def cycles(self) -> float:
        """The sum. No dictionary: a plan asks it thousands of times."""
        each = self.constants
        return (
            each["operands"] * self.operands
            + each["margins"] * self.margins
            + each["brought"] * self.brought
            + each["slices"] * self.slices
            + each["boxes"] * self.boxes
            + each["starved"] * self.starved
            + each["row_chunks"] * self.row_chunks
            + each["row_boxes"] * self.row_boxes
            + each["stepped"] * self.stepped
            + each["turns"] * self.turns
            + each["stored"] * self.stored
            + each["segments"] * self.segments
            + each["strip_segments"] * self.strip_segments
            + each["cut"] * self.cut
            + each["ragged"] * self.ragged
            + each["vectors"] * self.vectors
            + each["pieces"] * self.pieces
            + each["bare_stores"] * self.bare_stores
            + each["bare_segments"] * self.bare_segments
            + each["paired"] * self.paired
            + each["lines"] * self.lines
            + each["weights"] * self.weights
            + each["shallow"] * self.shallow
            + each["gathered"] * self.gathered
            + each["unit"]
        )

    @property
    def most(self) -> str:
        """The stage that takes most."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])


FILLING = (
    "margins",
    "brought",
    "slices",
    "boxes",
    "starved",
    "row_chunks",
    "row_boxes",
    "stepped",
    "gathered",
)
STORING = (
    "stored",
    "segments",
    "strip_segments",
    "cut",
    "ragged",
    "vectors",
    "pieces",
    "bare_stores",
    "bare_segments",
    "paired",
    "lines",
)
