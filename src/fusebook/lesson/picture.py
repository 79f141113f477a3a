"""Pictures of a kernel: which program owns which elements, what is padding, and what programs exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusebook.lesson._draw import _AMBER, _BLUE, _WIDTH, _arrow, _box, _drawing, _text, lanes, owners
from fusebook.lesson._show import Shown

__all__ = [
    "band",
    "bars",
    "blocks",
    "chunks",
    "coordinates",
    "gated",
    "lanes",
    "meeting",
    "operand",
    "owners",
    "partial_sums",
    "passes",
    "product",
    "routes",
    "rows",
    "segments",
    "shared_row",
    "table",
    "tile",
    "walk",
    "words",
]

_LEFT = 78.0


def _cells(x: float, y: float, width: float, height: float, inside: int, total: int) -> list[str]:
    """A row of a tile: elements of the matrix are filled, padding is dashed."""
    return [_box(x + i * width, y, width, height, _BLUE if i < inside else _AMBER, i < inside) for i in range(total)]


def _scale(y: float, width: float, columns: int, block: int, name: str) -> list[str]:
    """What the columns below a tile are called."""
    middle, end = _LEFT + width * columns / 2, _LEFT + width * (columns + block) / 2
    return [
        _text(middle, y, f"N = {columns} columns", "middle"),
        *([_text(end, y, "padding", "middle")] if block > columns else []),
        _text(_LEFT + width * block + 6, y, name),
    ]


def rows(rows: int, columns: int, block: int) -> Shown:
    """One program per row: each loads its row into a padded tile.

    Parameters
    ----------
    rows, columns : int
        Of the matrix.
    block : int
        Elements of a program's tile.
    """
    width, height = (_WIDTH - _LEFT - 96) / block, 18.0
    parts = _scale(12, width, columns, block, f"BLOCK = {block}")
    for i in range(rows):
        y = 20 + i * (height + 6)
        parts += [_text(_LEFT - 8, y + 13, f"program {i}", "end"), *_cells(_LEFT, y, width, height, columns, block)]
        parts.append(_text(_LEFT + width * block + 6, y + 13, f"row {i}"))
    told = [f"program {i} owns row {i}" for i in range(rows)]
    told.append(f"each loads {columns} elements and masks {block - columns} of {block}")
    caption = f"Program i owns row i. Its tile has {block} elements; the last {block - columns} are masked padding."
    return _drawing(caption, told, 24 + rows * (height + 6), parts)


def blocks(size: int, block: int) -> Shown:
    """One block of a vector per program: the last block ends after the vector.

    Parameters
    ----------
    size : int
        Elements of the vector.
    block : int
        Elements of a program's block.
    """
    programs = -(-size // block)
    width, gap = (_WIDTH - 4 - 8 * (programs - 1)) / (programs * block), 8.0
    parts, told = [], []
    for p in range(programs):
        x, first = 2 + p * (block * width + gap), p * block
        inside = min(block, size - first)
        parts += [_text(x + block * width / 2, 12, f"program {p}", "middle"), *_cells(x, 20, width, 22, inside, block)]
        parts += [_text(x + (i + 0.5) * width, 35, str(first + i), "middle") for i in range(inside)]
        told.append(f"program {p} owns elements {first} to {first + inside - 1}")
    masked = programs * block - size
    told.append(f"the last {masked} of {block} are masked")
    parts.append(_text(_WIDTH - 2, 58, f"{masked} masked", "end"))
    caption = f"A vector of SIZE = {size} elements. Each program owns BLOCK = {block} of them; dashed is masked."
    return _drawing(caption, told, 62, parts)


def tile(rows: int, columns: int, block: int, per: int) -> Shown:
    """Several rows per program: each loads a two-dimensional tile.

    Parameters
    ----------
    rows, columns : int
        Of the matrix.
    block, per : int
        Columns and rows of a program's tile.
    """
    width, height, gap = (_WIDTH - _LEFT - 96) / block, 15.0, 9.0
    parts, told = _scale(12, width, columns, block, f"BLOCK = {block}"), []
    programs = -(-rows // per)
    for i in range(programs * per):
        program, y = i // per, 20 + i * height + i // per * gap
        if i % per == 0:
            parts.append(_text(_LEFT - 8, y + per * height / 2 + 4, f"program {program}", "end"))
        parts += _cells(_LEFT, y, width, height, columns if i < rows else 0, block)
        parts.append(_text(_LEFT + width * block + 6, y + 12, f"row {i}" if i < rows else "no such row"))
    for program in range(programs):
        last = min(rows, program * per + per) - 1
        many = f"rows {program * per} to {last}" if last > program * per else f"row {last}"
        told.append(f"program {program} owns {many}")
    if extra := programs * per - rows:
        told.append(f"{extra} {'rows' if extra > 1 else 'row'} of the last tile past the end: masked")
    caption = f"A program owns ROWS = {per} rows. The last tile has rows past the end, which need a mask too."
    return _drawing(caption, told, 24 + programs * (per * height + gap), parts)


def chunks(columns: int, block: int, chunk: int) -> Shown:
    """A wide row in one padded tile, and the same row in equal chunks.

    Parameters
    ----------
    columns : int
        Of the matrix.
    block : int
        Elements of the one tile.
    chunk : int
        Elements of each chunk.
    """
    count = -(-columns // chunk)
    scale, height = (_WIDTH - 4) / max(block, count * chunk), 22.0
    parts = [_text(2, 12, f"one tile of {block}: {block - columns} elements are padding")]
    parts += [_box(2, 18, scale * columns, height, _BLUE)]
    parts += [_box(2 + scale * columns, 18, scale * (block - columns), height, _AMBER, False)]
    padding = count * chunk - columns
    parts.append(_text(2, 64, f"{count} chunks of {chunk}: {padding} elements are padding"))
    for i in range(count):
        inside = min(chunk, columns - i * chunk)
        x = 2 + scale * i * chunk
        parts.append(_box(x, 70, scale * inside, height, _BLUE))
        if inside < chunk:
            parts.append(_box(x + scale * inside, 70, scale * (chunk - inside), height, _AMBER, False))
    told = [f"one tile of {block} has {block - columns} elements of padding"]
    told.append(f"{count} chunks of {chunk} have {padding}")
    return _drawing(f"A row of {columns} elements: filled is data, dashed is padding.", told, 96, parts)


def shared_row(programs: int) -> Shown:
    """A row that several programs share: each publishes a pair and merges those of all.

    Parameters
    ----------
    programs : int
        How many share the row.
    """
    width = (_WIDTH - _LEFT - 10) / programs
    levels = {"row": 20.0, "workspace": 76.0, "result": 132.0}
    parts = [_text(_LEFT - 8, y + 15, name, "end") for name, y in levels.items()]
    centre = _LEFT + width * programs / 2
    for i in range(programs):
        x = _LEFT + i * width
        parts.append(_text(x + width / 2, 13, f"program {i}", "middle"))
        for (name, y), text in zip(levels.items(), (f"part {i}", "(max, sum)", f"part {i}"), strict=True):
            parts.append(_box(x + 2, y, width - 4, 22, _AMBER if name == "workspace" else _BLUE))
            parts.append(_text(x + width / 2, y + 15, text, "middle"))
        parts.append(_arrow(x + width / 2, 42, x + width / 2, 75))
        parts.append(_arrow(centre, 110, x + width / 2, 131))
        parts.append(_arrow(x + width / 2, 98, centre, 109))
    parts.append(_text(_LEFT - 8, 63, "publish", "end"))
    parts.append(_text(_LEFT - 8, 115, "merge", "end"))
    told = ["each program reduces its own part of the row to a pair (max, sum)"]
    told += ["writes the pair to the workspace in global memory", f"waits for all {programs} pairs and merges them"]
    told.append("and writes its own part of the result")
    caption = f"{programs} programs share one row. The only data they exchange is {programs} pairs of numbers."
    return _drawing(caption, told, 158, parts)


def coordinates(points: int) -> Shown:
    """Points of two coordinates in memory: a load for each coordinate, and one load of two points for each thread.

    Parameters
    ----------
    points : int
        An even number of them.
    """
    width, height = (_WIDTH - _LEFT - 4) / (2 * points), 20.0

    def cells(y: float, name: str, texts: Mapping[int, str], colour: str, wide: int = 1) -> list[str]:
        made = [_text(_LEFT - 8, y + 15, name, "end")]
        for i, text in texts.items():
            x = _LEFT + i * width
            made += [_box(x + 1, y, wide * width - 2, height, colour)]
            made += [_text(x + wide * width / 2, y + 15, text, "middle")]
        return made

    parts = cells(4, "memory", {i: f"{'xy'[i % 2]}{i // 2}" for i in range(2 * points)}, _BLUE)
    for load in range(2):
        texts = {2 * i + load: f"t{i}" for i in range(points)}
        parts += cells(40 + 24 * load, f"step 1, {'xy'[load]}", texts, _AMBER)
    parts += cells(100, "step 2", {4 * t: f"thread {t}: 16 bytes" for t in range(points // 2)}, _AMBER, 4)
    told = ["memory holds x and y of one point after another"]
    told += [f"in step 1, a load takes {name} of each point, which is every second word" for name in "xy"]
    told += [f"in step 2, thread {t} loads points {2 * t} and {2 * t + 1} at once" for t in range(points // 2)]
    caption = "Step 1 loads twice, with gaps; thread i (ti) has point i. Step 2 loads once, without gaps."
    return _drawing(caption, told, 124, parts)


def routes(caption: str, rows: Sequence[tuple[str, str, str]]) -> Shown:
    """Where calls go: a row for each caller, with what it meets and what then happens.

    Parameters
    ----------
    caption : str
    rows : sequence of (str, str, str)
        A caller, what serves it, and what that does.
    """
    width, step, parts, told = (_WIDTH - 44) / 3, 32.0, [], []
    for i, row in enumerate(rows):
        y = 2 + step * i
        for j, text in enumerate(row):
            x = 2 + j * (width + 20)
            parts += [_box(x, y, width, 24, _AMBER if j == 1 else _BLUE), _text(x + width / 2, y + 16, text, "middle")]
            parts += [_arrow(x - 19, y + 12, x - 1, y + 12)] if j else []
        told.append(f"{row[0]}: {row[1]}, {row[2]}")
    return _drawing(caption, told, step * len(rows), parts)


def band(points: Sequence[Sequence[float]], centres: Sequence[Sequence[float]], error: float) -> Shown:
    """Points of the plane between two centres: those whose squared distances differ by less than an error are marked.

    Parameters
    ----------
    points : sequence of (float, float)
    centres : sequence of (float, float)
        Two of them.
    error : float
        By what the difference of two squared distances may be wrong.
    """
    (ax, ay), (bx, by) = centres
    left, right = (extreme(x for x, _ in [*points, *centres]) for extreme in (min, max))
    low, high = (extreme(y for _, y in [*points, *centres]) for extreme in (min, max))
    scale = min((_WIDTH - 20) / (right - left), 220 / (high - low))
    height = scale * (high - low) + 20

    def at(x: float, y: float) -> tuple[float, float]:
        return 10 + scale * (x - left), height - 10 - scale * (y - low)

    def apart(x: float, y: float) -> float:
        return (x - bx) ** 2 + (y - by) ** 2 - (x - ax) ** 2 - (y - ay) ** 2

    # The difference grows by 2 |b - a|**2 along b - a, so the band's edges are error / (2 |b - a|**2) from its middle.
    dx, dy = bx - ax, by - ay
    shift, reach = error / (2 * (dx * dx + dy * dy)), 4 * max(right - left, high - low)
    long = (dx * dx + dy * dy) ** 0.5
    middle = [((ax + bx) / 2 + side * shift * dx, (ay + by) / 2 + side * shift * dy) for side in (-1, 1)]
    ends = [(x - t * dy / long, y + t * dx / long) for x, y in middle for t in (-reach, reach)]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*ends[i]) for i in (0, 1, 3, 2)))
    parts = [f'<polygon points="{corners}" fill="{_AMBER}" fill-opacity="0.15" stroke="{_AMBER}"/>']
    inside = 0
    for x, y in points:
        undecided = abs(apart(x, y)) <= error
        inside += undecided
        (cx, cy), colour = at(x, y), _AMBER if undecided else _BLUE
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>')
    for x, y in centres:
        cx, cy = at(x, y)
        parts.append(f'<path d="M{cx - 8:.1f} {cy:.1f}h16m-8 -8v16" stroke="currentColor" stroke-width="3"/>')
    told = [f"{len(points)} points around two centres", f"{inside} are in the band halfway between them, and undecided"]
    caption = f"Crosses are centres. Of {len(points)} points, {inside} are in the band (amber) and computed again."
    return _drawing(caption, told, height, parts)


def table(sizes: Sequence[int], block: int) -> Shown:
    """Programs that find their tensor in a table: one for each chunk of a list of tensors.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each tensor.
    block : int
        Elements of a chunk.
    """
    chunks = [(i, c) for i, size in enumerate(sizes) for c in range(-(-size // block))]
    step, left, right = 24.0, 92.0, 308.0
    height = 24 + step * len(chunks)
    parts = [_text(left + 45, 12, "chunks", "middle"), _text(left + 150, 12, "table", "middle")]
    parts.append(_text((right + _WIDTH) / 2, 12, "tensors in memory", "middle"))
    scale, told = (_WIDTH - right - 4) / max(sizes), []
    rows = {i: 20 + (height - 24) * (i + 0.5) / len(sizes) - 9 for i in range(len(sizes))}
    for i, size in enumerate(sizes):
        parts.append(_box(left + 112, rows[i], 76, 18, _AMBER))
        parts.append(_text(left + 150, rows[i] + 13, f"{i}: size, p, ..", "middle"))
        parts.append(_arrow(left + 188, rows[i] + 9, right - 2, rows[i] + 9))
        for c in range(-(-size // block)):
            wide = min(block, size - c * block)
            parts.append(_box(right + scale * c * block, rows[i], scale * wide, 18, _BLUE))
            parts.append(_text(right + scale * (c * block + wide / 2), rows[i] + 13, str(c), "middle"))
    for program, (i, c) in enumerate(chunks):
        y = 20 + step * program
        parts.append(_text(left - 8, y + 13, f"program {program}", "end"))
        parts += [_box(left, y, 90, 18, _BLUE), _text(left + 45, y + 13, f"tensor {i}, {c}", "middle")]
        parts.append(_arrow(left + 90, y + 9, left + 110, rows[i] + 9))
        told.append(f"program {program} steps chunk {c} of tensor {i}")
    caption = f"A program for each chunk of {block} elements. It reads its chunk's tensor, and that tensor's addresses."
    return _drawing(caption, told, height, parts)


def operand(lane: int) -> Shown:
    """Which lane of a warp holds which weight of an instruction of a tensor core, and what its words hold.

    Parameters
    ----------
    lane : int
        The lane whose elements are marked.
    """
    width, height, top = 17.0, 12.0, 18.0
    parts, own = [_text(0, 12, "16 rows x 16 columns: lanes 0 to 31")], []
    for row in range(16):
        for column in range(16):
            x, y, holder = column * width, top + row * height, row % 8 * 4 + column % 8 // 2
            if holder == lane:
                parts.append(_box(x, y, width, height, _AMBER))
                own.append((row, column))
            parts.append(_text(x + width / 2, y + 10, str(holder), "middle"))
    left = 16 * width + 22
    parts.append(_text(left, 12, f"lane {lane} loads 8 words"))
    for i in range(len(own)):
        y = top + i * 24
        parts += [_box(left + j * 17, y, 17, 20, _BLUE) for j in range(8)]
        parts += [_text(left + j * 17 + 8.5, y + 14, str(j), "middle") for j in range(8)]
    places = ", ".join(f"({row}, {column})" for row, column in own)
    told = [f"lane {lane} holds the elements {places}", "it loads eight words, one for each of them"]
    told.append("code j of a word is for instruction j")
    caption = f"Left: who holds which weight. Right: the words of lane {lane}; code j is for instruction j."
    return _drawing(caption, told, top + 16 * height + 4, parts)


def passes(chunks: int) -> Shown:
    """A program that reads its row twice, a chunk at a time: for the loss, and for the gradient.

    Parameters
    ----------
    chunks : int
        Of the row.
    """
    width, half = (_WIDTH - _LEFT - 10) / chunks, _WIDTH / 2 + _LEFT / 2
    parts = [_text(_LEFT - 8, y, name, "end") for name, y in (("logits", 35), ("registers", 91), ("gradient", 147))]
    parts.append(_text(half, 13, "program i owns row i", "middle"))
    parts.append(_box(_LEFT + 2, 76, width * chunks - 4, 22, _AMBER))
    parts.append(_text(half, 91, "one chunk, and the row's max and sum", "middle"))
    for j in range(chunks):
        x = _LEFT + j * width
        for y in (20, 132):
            parts += [_box(x + 2, y, width - 4, 22, _BLUE), _text(x + width / 2, y + 15, f"chunk {j}", "middle")]
        parts.append(_arrow(x + width * 0.35, 42, x + width * 0.35, 75))
        parts.append(_arrow(x + width * 0.65, 42, x + width * 0.65, 75))
        parts.append(_text(x + width * 0.35 - 5, 63, "1", "end"))
        parts.append(_text(x + width * 0.65 + 5, 63, "2"))
        parts.append(_arrow(x + width * 0.65, 98, x + width * 0.65, 131))
        parts.append(_text(x + width * 0.65 + 5, 119, "2"))
    told = ["program i owns row i and never waits for another program"]
    told += [f"pass 1 reads {chunks} chunks and keeps the row's max and sum in registers"]
    told += ["pass 2 reads each chunk again and writes its gradient"]
    caption = "Pass 1 reads the row for the loss. Pass 2 reads it again, from L2 or memory, for the gradient."
    return _drawing(caption, told, 160, parts)


def partial_sums(rows: int, programs: int, row: str = "row", result: str = "dw") -> Shown:
    """Programs that each own several rows: their partial sums stay in registers, and are added at the end.

    Parameters
    ----------
    rows, programs : int
    row, result : str
        What a row is called, and what their sums become.
    """
    turns = rows // programs
    width = (_WIDTH - _LEFT - 10) / (turns + 2)
    names = [*(f"turn {i + 1}" for i in range(turns)), "registers", "kernel 2"]
    parts = [_text(_LEFT + (i + 0.5) * width - 6, 13, name, "middle") for i, name in enumerate(names)]
    for p in range(programs):
        y = 20.0 + 30 * p
        parts.append(_text(_LEFT - 8, y + 15, f"program {p}", "end"))
        for i, name in enumerate([*(f"{row} {p + i * programs}" for i in range(turns)), f"part {p}"]):
            x = _LEFT + i * width
            parts += [_box(x + 2, y, width - 16, 22, _BLUE if i < turns else _AMBER)]
            parts += [
                _text(x + width / 2 - 6, y + 15, name, "middle"),
                _arrow(x + width - 13, y + 11, x + width, y + 11),
            ]
    x, height = _LEFT + (turns + 1) * width, 30.0 * programs
    parts += [_box(x + 2, 20, width - 16, height - 8, _AMBER)]
    parts.append(_text(x + width / 2 - 6, 21 + height / 2, result, "middle"))
    told = [f"program {p} owns {row}s {', '.join(map(str, range(p, rows, programs)))}" for p in range(programs)]
    told += [f"each keeps its part of {result} in registers", "another kernel waits for all parts and adds them"]
    caption = f"A program keeps its part of {result} in registers and waits for no other. Kernel 2 waits for all parts."
    return _drawing(caption, told, 20 + height, parts)


def bars(caption: str, values: Mapping[str, float], texts: Mapping[str, str], marked: Sequence[str] = ()) -> Shown:
    """A horizontal bar per name, with its text; those that are marked have the second colour."""
    # A letter is about 6.6 wide, and a digit 7.
    left, step, width = max(90.0, 14 + 6.6 * max(map(len, values))), 22.0, 300.0
    right = max(68.0, 10 + 7 * max(map(len, texts.values())))
    scale = (width - left - right) / max(values.values())
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y = 2 + i * step
        parts.append(_text(left - 8, y + 14, name, "end"))
        parts.append(_box(left, y, scale * value, 18, _AMBER if name in marked else _BLUE))
        parts.append(_text(left + scale * value + 6, y + 14, texts[name]))
    return _drawing(caption, [f"{name}: {texts[name]}" for name in values], 4 + step * len(values), parts, width)


def segments(caption: str, moved: Mapping[str, Sequence[tuple[str, float, float]]], unit: str) -> Shown:
    """What each operation reads and writes: a bar per operation, under the name of its implementation.

    Parameters
    ----------
    caption : str
    moved : mapping of str to sequence of (str, float, float)
        By implementation: the operations, each with what it reads and writes in units.
    unit : str
        What one unit is.
    """
    most = max(read + write for steps in moved.values() for _, read, write in steps)
    left, y, parts, told = 108.0, 4.0, [], []
    scale = (_WIDTH - left - 100) / most
    for name, steps in moved.items():
        for operation, read, write in steps:
            parts.append(_text(left - 8, y + 14, operation, "end"))
            x, said = left, []
            for amount, word, colour in ((read, "read", _BLUE), (write, "write", _AMBER)):
                if amount:
                    parts.append(_box(x, y, scale * amount, 18, colour))
                    parts.append(_text(x + scale * amount / 2, y + 13, word, "middle"))
                    x += scale * amount
                    said.append(f"{word}s {amount:g} {unit}")
            told.append(f"{name}, {operation}: {' and '.join(said)}")
            y += 22
        total = sum(read + write for _, read, write in steps)
        parts.append(_text(left + scale * most + 8, y - 22 * len(steps) / 2 + 4, f"{name}: {total:g} {unit}"))
        y += 12
    return _drawing(caption, told, y - 8, parts)


def product(rows: int, columns: int, program: int) -> Shown:
    """Two matmuls of one input as tiles of one output: what one program loads, and where its tile is.

    Parameters
    ----------
    rows, columns : int
        Of tiles, of each product.
    program : int
        Its number: tiles are counted row by row, over both products.
    """
    side, left, top, deep = 22.0, 168.0, 92.0, 66.0
    r, c = divmod(program, 2 * columns)
    parts = []
    for i in range(2):
        x = left + i * columns * side
        parts += [_box(x, 18, columns * side, deep, _BLUE, False), _text(x + 4, 12, f"w{i}: K x N")]
    parts += [_box(left - 8 - deep, top, deep, rows * side, _BLUE, False), _text(left - 8 - deep, top - 6, "x: M x K")]
    for i in range(rows):
        for j in range(2 * columns):
            mine = (i, j) == (r, c)
            parts.append(_box(left + j * side, top + i * side, side, side, _AMBER if mine else _BLUE, mine))
    x, y = left + c * side, top + r * side
    parts += [_box(x, 18, side, deep, _BLUE), _box(left - 8 - deep, y, deep, side, _BLUE)]
    parts += [_box(x, 18 + deep / 3, side, deep / 3, _AMBER), _box(left - 8 - deep * 2 / 3, y, deep / 3, side, _AMBER)]
    parts.append(_text(left + columns * side, top + rows * side + 16, "y: M x 2N, a program for each tile", "middle"))
    parts.append(_text(left - 8 - deep - 6, y + 15, "walks along K", "end"))
    parts.append(_text(left + 2 * columns * side + 6, y + 15, f"program {program}"))
    weight = f"w{c // columns}"
    told = [f"program {program} owns one tile of y", f"it reads a row of tiles of x and a column of tiles of {weight}"]
    caption = (
        f"Program {program} owns the amber tile of y and keeps its sum in registers. Each turn of its loop loads one "
        f"tile of x and one of {weight}."
    )
    return _drawing(caption, told, top + rows * side + 22, parts)


def gated(rows: int, columns: int, program: int) -> Shown:
    """Two matmuls in one kernel: what one program loads of x and of both weights, and what it keeps.

    Parameters
    ----------
    rows, columns : int
        Of tiles of the output.
    program : int
        Its number: tiles are counted column by column.
    """
    side, left, deep, gap = 20.0, 112.0, 44.0, 20.0
    c, r = divmod(program, rows)
    top, x, parts = 2 * deep + gap + 22, left + c * side, []
    for name, y in (("gate", 12.0), ("up", 12 + deep + gap)):
        parts += [_box(left, y, columns * side, deep, _BLUE, False), _box(x, y, side, deep, _BLUE)]
        parts += [_box(x, y + deep / 3, side, deep / 3, _AMBER), _text(left - 8, y + 26, f"{name}: K x N", "end")]
    for i in range(rows):
        for j in range(columns):
            mine = (i, j) == (r, c)
            parts.append(_box(left + j * side, top + i * side, side, side, _AMBER if mine else _BLUE, mine))
    y, start = top + r * side, left - 8 - deep
    parts += [_box(start, top, deep, rows * side, _BLUE, False), _box(start, y, deep, side, _BLUE)]
    parts += [_box(start + deep / 3, y, deep / 3, side, _AMBER), _text(start - 6, y + 15, "x: M x K", "end")]
    parts.append(_text(left + columns * side / 2, top + rows * side + 16, "y: M x N", "middle"))
    right = left + columns * side + 26
    steps = ("g += x @ gate", "u += x @ up", "y = silu(g) * u")
    for i, (name, kept) in enumerate(zip(steps, ("registers", "registers", "stored"), strict=True)):
        at = 34 + 58.0 * i
        parts += [_box(right, at, 116, 30, _AMBER if i < 2 else _BLUE), _text(right + 58, at + 19, name, "middle")]
        parts.append(_text(right + 122, at + 19, kept))
        parts += [_arrow(right + 58, at + 30, right + 58, at + 57)] if i == 1 else []
    parts.append(_text(right, 24, f"program {program}, in each turn:"))
    parts.append(_text(right + 66, 142, "after the loop"))
    told = [f"program {program} owns one tile of y", "each turn loads a tile of x, of gate and of up"]
    told.append("two sums stay in registers, and y is written once")
    caption = (
        f"Program {program} owns the amber tile of y. Each turn loads one tile of x and one of each weight (amber). "
        "Before a turn it waits for these three tiles only."
    )
    return _drawing(caption, told, top + rows * side + 22, parts)


def walk(rows: int, columns: int, running: int, group: int) -> Shown:
    """Which tiles the running programs have, row by row and in groups of rows, and what they read.

    Parameters
    ----------
    rows, columns : int
        Of tiles.
    running : int
        Programs that run at once.
    group : int
        Rows of a group.
    """
    side, high, left = 26.0, 19.0, 64.0
    parts, told, y = [], [], 4.0
    for name, height in (("row by row", 1), (f"in groups of {group} rows", group)):
        at = {}
        for tile in range(rows * columns):
            first, inside = tile // (height * columns) * height, tile % (height * columns)
            tall = min(rows - first, height)
            at[first + inside % tall, inside // tall] = tile
        busy = [place for place, tile in at.items() if tile < running]
        strips = [{place[axis] for place in busy} for axis in (0, 1)]
        count = " + ".join(str(len(strip)) for strip in strips)
        total = sum(map(len, strips))
        parts.append(_text(left, y + 10, f"{name}: {count} = {total} strips"))
        y += 18
        for j in range(columns):
            parts.append(_box(left + j * side + 2, y, side - 4, 10, _AMBER, j in strips[1]))
        parts.append(_text(left + columns * side + 6, y + 10, "w"))
        y += 14
        for i in range(rows):
            parts.append(_box(left - 16, y + i * high + 2, 10, high - 4, _AMBER, i in strips[0]))
            for j in range(columns):
                parts.append(_box(left + j * side, y + i * high, side, high, _BLUE, at[i, j] < running))
                parts.append(_text(left + j * side + side / 2, y + i * high + 14, str(at[i, j]), "middle"))
        parts.append(_text(left - 22, y + rows * high / 2 + 4, "x", "end"))
        y += rows * high + 14
        rest = f"{len(strips[0])} of {rows} rows of x and {len(strips[1])} of {columns} columns of w"
        told.append(f"{name}, the first {running} programs read {rest}")
    caption = (
        f"Tiles of the output by program id; the first {running} programs run (filled). Each needs one strip of x and "
        "one of the weights (amber)."
    )
    return _drawing(caption, told, y - 6, parts)


def words() -> Shown:
    """A float64 sum in two words of 64 bits, each with the number of the iteration."""
    width, height, left = (_WIDTH - 120) / 4, 22.0, 100.0
    parts = [_text(left - 8, 18, "a sum", "end"), _box(left, 3, width, height, _BLUE), _text(left + 6, 18, "high half")]
    parts += [_box(left + width, 3, width, height, _BLUE), _text(left + width + 6, 18, "low half")]
    for i, half in enumerate(("high half", "low half")):
        x = left + 2 * i * width
        parts.append(_arrow(left + (i + 0.5) * width, 26, x + width / 2, 52))
        parts += [_box(x, 54, width - 2, height, _BLUE), _text(x + 6, 69, half)]
        parts += [_box(x + width - 2, 54, width - 4, height, _AMBER), _text(x + width + 4, 69, "iteration")]
    parts.append(_text(left - 8, 69, "two words", "end"))
    told = ["a sum of 64 bits has two halves", "each half and the number of the iteration are a word of 64 bits"]
    caption = "A sum travels in two words of 64 bits. The receiver waits until both have the number of the iteration."
    return _drawing(caption, told, 82, parts)


def meeting() -> Shown:
    """Two GPUs that write their parts, meet, read each other's part, and meet again."""
    left, width, height = 70.0, (_WIDTH - 80) / 5, 24.0
    stages = ("write part", "raise flag", "read all", "raise flag", "write next")
    parts = []
    for gpu in range(2):
        y = 10 + gpu * 62
        parts.append(_text(left - 8, y + 16, f"GPU {gpu}", "end"))
        for i, stage in enumerate(stages):
            x = left + i * width
            parts += [_box(x, y, width - 8, height, _AMBER if i % 2 else _BLUE), _text(x + 6, y + 16, stage)]
    for i in (1, 3):
        x = left + i * width
        parts += [_arrow(x + 20, 36, x + width + 4, 70), _arrow(x + 20, 70, x + width + 4, 36)]
    told = ["each GPU writes its part and raises a flag", "it reads all parts when all flags are up"]
    told.append("a second flag says that it has read them, and the next part is written")
    caption = "Program p of each GPU, from left to right. No GPU goes on before the flag of the other has arrived."
    return _drawing(caption, told, 104, parts)
