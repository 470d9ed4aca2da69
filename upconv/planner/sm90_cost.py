"""What the Hopper kernel costs: work of one unit in, cycles out.

The constants are fitted by `benchmarks/fit_sm90.py` to tilings measured on an H200
(`benchmarks/results/h200-tilings-2026-11-15.jsonl`, 2215 runs of 33 problems, of which those within
1.3x of their problem's best count), by least squares with non-negative terms; the standard
deviation is 10 %. The terms add up because the stages of the pipeline share the shared-memory port
and wait for each other; where they overlap fully the largest one alone would count. A test compares
the constants with the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

CLOCK_MHZ = 1700.0
"""Sustained under tensor load on an H200."""
DRAM_BYTES = 18.4
"""Bytes a cycle: 4.27 TB/s copy rate, for one of 132 multiprocessors at CLOCK_MHZ."""

CYCLES = {
    "tensor": 0.4675,
    "placed": 0.02902,
    "slices": 63.43,
    "starved": 0.0,
    "turns": 499.7,
    "stored": 0.05338,
    "segments": 4.027,
    "weights": 0.02125,
    "bare_stores": 0.005791,
    "bare_segments": 3.236,
    "kept": 362.8,
    "unit": 116.8,
}
"""For each unit of the `UnitWork` field of that name; "unit" is what every unit costs besides."""
SPLIT_CYCLES = {
    "tensor": 0.3985,
    "placed": 0.05341,
    "slices": 442.2,
    "starved": 0.0,
    "turns": 801.8,
    "stored": 0.04712,
    "segments": 3.546,
    "weights": 0.03946,
    "bare_stores": 0.0,
    "bare_segments": 0.0,
    "kept": 0.0,
    "unit": 578.8,
}
"""The same where float32 is split: 500 runs of 19 problems (`h200-split-tilings-2026-11-15.jsonl`),
standard deviation 3.5 %."""
GATHER_FACTORS = (2.0, 3.5, 40.0)
"""How much slower a tile fills where the loaders copy by themselves instead of TMA: 16 bytes at a
time, 4 bytes, one element of 16 bits."""
STEPPED_GATHER = 1.5
"""The same again where columns are taken with a step. All from what was left of backward passes on
an H200 without the weight's gradient and the bias's, not from runs of their own: kb57 and kb71 2 to
3.5, kb77_3d, kb79_1d and kb81 5 to 7 in TF32 and 35 to 50 in BF16."""
LINE_STAGED, LINE_VECTOR = 0.25, 0.65
"""Stores by lines, of more than two width phases or few channels: cycles for each accumulator, used
or not, and for each vector written. Fitted to 60 tilings of kb75, kb81, fsrcnn, kb72_3d and
hifigan1_1d beside the constants above (`h200-line-tilings-2026-11-15.jsonl`), standard deviation
8.7 %; the width of a vector hardly counts, so the bytes do not."""
LINE_SHIFTED = 0.45
"""For each accumulator where lines begin anywhere in 16 bytes and have more than two width phases:
kb81, expected at 0.42 and 0.33 ms with this, took 0.44 in TF32 and 0.33 in BF16. kb79_1d, which has
two, was expected at 0.46 and 0.33 without and took 0.57 and 0.32."""
FEEDING = {"chunk": 400.0, "box": 120.0, "byte": 0.02, "step": 300.0}
"""What the feeding thread needs where a tile comes in several TMA boxes: to find room for all boxes
of some channel blocks (a chunk), to start each of them, and to start a weight block. From 480
tilings of 13 input gradients (`h200-row-boxes-2026-11-15.jsonl`): those so chosen are 2 % slower
than the fastest on average, 13 % at worst; the standard deviation is 16 %."""
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, 6 to 15 us where the weight is not frozen."""
START_CYCLES = 4000.0
"""Launch, first slice and last store, which nothing hides."""


def fill_factor(copy: int, step: int) -> float:
    """How much longer a tile takes to fill than from whole TMA boxes of neighbouring columns.

    Of such a box every `step`-th column: 2, 4 or 8 lanes then read from the same bank. (With kernel
    and stride 4 the input's gradient took 3.7 times what the rule said in TF32, 4.1 in BF16; with 2
    1.4 times.)
    """
    if copy < len(GATHER_FACTORS):
        return GATHER_FACTORS[copy] * (STEPPED_GATHER if step > 1 else 1.0)
    return (1 + gcd(step, 32)) / 2 if copy == len(GATHER_FACTORS) else 1.0


def line_cycles(staged: float, vectors: float, shifted: bool) -> float:
    """Of stores by lines. `shifted`: several width phases of lines that begin anywhere."""
    return staged * (LINE_SHIFTED if shifted else LINE_STAGED) + vectors * LINE_VECTOR


def feeding_cycles(chunks: float, boxes: int, chunk_bytes: int, steps: float) -> float:
    """Of a unit, for chunks of so many boxes and bytes each, and for its weight blocks."""
    each = FEEDING["chunk"] + boxes * FEEDING["box"] + chunk_bytes * FEEDING["byte"]
    return chunks * each + steps * FEEDING["step"]


@dataclass(frozen=True)
class UnitWork:
    """What the stages of the pipeline have to do for one unit of work."""

    tensor: float
    """Cycles that the tensor cores need by themselves."""
    placed: float
    """Bytes of the tile, margins included, written in its own layout."""
    slices: float
    starved: float
    """Boxes that are loaded with only one other in the ring: too few to hide the memory's delay."""
    turns: float
    """Turns of the consumers at the tensor cores; where float32 is split, additions to the sums."""
    stored: float
    """Bytes written."""
    segments: float
    """Pieces of output rows that are written in one go."""
    weights: float
    """Bytes of packed weights streamed from L2."""
    bare_stores: float
    """Bytes written while no other consumer multiplies: the consumers take no turns."""
    bare_segments: float
    """The same, pieces of output rows."""
    kept: float
    """Slices that are multiplied with weights that stay in shared memory."""
    lines: float = 0.0
    """Cycles of stores by lines, which `stored` and `segments` leave out."""
    fed: float = 0.0
    """Cycles of the feeding thread, beside everything else; 0 where it is not what limits."""
    split: bool = False
    """float32 that must not be rounded."""

    @property
    def constants(self) -> dict[str, float]:
        return SPLIT_CYCLES if self.split else CYCLES

    @property
    def terms(self) -> dict[str, float]:
        """Cycles by stage, in words that `explain` prints."""
        constants = self.constants
        cost = {name: each * getattr(self, name, 0.0) for name, each in constants.items()}
        return {
            "the tensor cores": cost["tensor"],
            "filling the tile": cost["placed"] + cost["slices"] + cost["starved"],
            "additions to the sums" if self.split else "turns of the consumers": cost["turns"],
            "the stores": cost["stored"]
            + cost["segments"]
            + cost["bare_stores"]
            + cost["bare_segments"]
            + self.lines,
            "the weights": cost["weights"] + cost["kept"],
        }

    @property
    def cycles(self) -> float:
        """The sum, or the boxes. No dictionary: a plan asks it thousands of times."""
        each = self.constants
        total = (
            each["tensor"] * self.tensor
            + each["placed"] * self.placed
            + each["slices"] * self.slices
            + each["starved"] * self.starved
            + each["turns"] * self.turns
            + each["stored"] * self.stored
            + each["segments"] * self.segments
            + each["weights"] * self.weights
            + each["bare_stores"] * self.bare_stores
            + each["bare_segments"] * self.bare_segments
            + each["kept"] * self.kept
            + each["unit"]
            + self.lines
        )
        return max(total, self.fed)

    @property
    def most(self) -> str:
        """The stage that takes most."""
        terms = self.terms
        if self.fed > sum(terms.values()):
            return "starting the boxes"
        return max(terms, key=lambda name: terms[name])
