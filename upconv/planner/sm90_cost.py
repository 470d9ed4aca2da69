"""What the Hopper kernel costs: work of one unit in, cycles out.

The constants are fitted by `benchmarks/fit_sm90.py` to tilings measured on an H200
(`benchmarks/results/h200-tilings-2026-11-15.jsonl`, 2486 runs of 37 problems, of which those within
1.2x of their problem's best count), by least squares with non-negative terms; the standard
deviation is 7.4 %. The terms add up because the stages of the pipeline share the shared-memory port
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
    "operands": 1.06,
    "placed": 0.007672,
    "slices": 130.5,
    "boxes": 70.6,
    "starved": 52.42,
    "turns": 673.2,
    "stored": 0.02949,
    "segments": 3.337,
    "weights": 0.00878,
    "bare_stores": 0.02232,
    "bare_segments": 2.761,
    "paired": 0.04343,
    "kept": 94.55,
    "unit": 1013.0,
}
"""For each unit of the `UnitWork` field of that name; "unit" is what every unit costs besides."""
SPLIT_CYCLES = {
    "operands": 0.7045,
    "placed": 0.04184,
    "slices": 618.8,
    "boxes": 10.67,
    "starved": 0.0,
    "turns": 717.7,
    "stored": 0.01115,
    "segments": 3.582,
    "weights": 0.03013,
    "bare_stores": 0.0,
    "bare_segments": 0.0,
    "paired": 0.0,
    "kept": 0.0,
    "unit": 2340.0,
}
"""The same where float32 is split: 547 runs (`h200-split-tilings-2026-11-15.jsonl`), standard
deviation 4.4 %."""
GATHER_CYCLES = (0.058, 0.1, 1.2)
"""For each byte of a tile that the loaders copy by themselves instead of TMA: 16 bytes at a time, 4
bytes, one element of 16 bits."""
STEPPED_GATHER = 1.5
"""So many times that where columns are taken with a step. All from what was left of backward passes
on an H200 without the weight's gradient and the bias's, not from runs of their own: 2 to 3.5 times
what TMA takes on kb57 and kb71, 5 to 7 in TF32, 35 to 50 in BF16 on kb77_3d, kb79_1d and kb81."""
STEPPED_BOX = 0.0145
"""For each byte of a tile that is every so many-th column of a TMA box, and each lane but one that
reads from the same bank. (With kernel and stride 4 the input's gradient took 3.7 times what the
rule without this said in TF32, 4.1 in BF16; with 2 1.4 times.)"""
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
BOX_ROW = 6.0
"""What TMA needs at least for a row of a box: dcgan1 in BF16 with two images a tile, 10,240 rows
of 48 bytes a unit, took 67,000 cycles where the terms above add up to 42,000."""
PARTIAL_SECTOR = 3.0
"""L2 takes about 55 G parts of sectors a second, a third of what it takes of whole ones."""
PACK_MICROSECONDS = 8.0
"""Packing the weights: a second launch, 6 to 15 us where the weight is not frozen."""
START_CYCLES = 4000.0
"""Launch, first slice and last store, which nothing hides."""


def gathering_cycles(copy: int, step: int) -> float:
    """For each byte of a tile, what it takes beside TMA boxes of neighbouring columns."""
    if copy < len(GATHER_CYCLES):
        return GATHER_CYCLES[copy] * (STEPPED_GATHER if step > 1 else 1.0)
    return STEPPED_BOX * (gcd(step, 32) - 1) if copy == len(GATHER_CYCLES) else 0.0


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

    operands: float
    """Reads of shared memory, 128 bytes each, for the operands of the WGMMAs. One of 64 rows and N
    columns takes N / 2 cycles and 16 + N / 4 such reads; the port of shared memory is what limits:
    the reads above predict better than the cycles, at one cycle each."""
    placed: float
    """Bytes of the tile, margins included, written in its own layout."""
    slices: float
    boxes: float
    """TMA boxes, or chunks of several, that loaders wait for and give back."""
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
    paired: float
    """Bytes written by both consumers together, who meet for it."""
    kept: float
    """Slices that are multiplied with weights that stay in shared memory."""
    gathered: float = 0.0
    """Cycles to fill the tile where TMA does not do it, or brings more columns than are used."""
    lines: float = 0.0
    """Cycles of stores by lines, which `stored` and `segments` leave out."""
    fed: float = 0.0
    """Cycles of the feeding thread, or of TMA, beside everything else."""
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
            "the tensor cores": cost["operands"],
            "filling the tile": cost["placed"]
            + cost["slices"]
            + cost["boxes"]
            + cost["starved"]
            + self.gathered,
            "additions to the sums" if self.split else "turns of the consumers": cost["turns"],
            "the stores": cost["stored"]
            + cost["segments"]
            + cost["bare_stores"]
            + cost["bare_segments"]
            + cost["paired"]
            + self.lines,
            "the weights": cost["weights"] + cost["kept"],
        }

    @property
    def cycles(self) -> float:
        """The sum, or the boxes. No dictionary: a plan asks it thousands of times."""
        each = self.constants
        total = (
            each["operands"] * self.operands
            + each["placed"] * self.placed
            + each["slices"] * self.slices
            + each["boxes"] * self.boxes
            + each["starved"] * self.starved
            + each["turns"] * self.turns
            + each["stored"] * self.stored
            + each["segments"] * self.segments
            + each["weights"] * self.weights
            + each["bare_stores"] * self.bare_stores
            + each["bare_segments"] * self.bare_segments
            + each["paired"] * self.paired
            + each["kept"] * self.kept
            + each["unit"]
            + self.gathered
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
