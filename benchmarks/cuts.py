"""Lists of sizes laid out by either cut."""

from collections.abc import Sequence

from zero.shards import layout

ALIGN = 16


def cut(partition: str, sizes: Sequence[int], world: int) -> layout.Layout:
    if partition == "even":
        return layout.even(sizes, world, align=ALIGN)
    owners = layout.assign(sizes, [0] * world)
    order = sorted(range(len(sizes)), key=owners.__getitem__)
    return layout.whole([sizes[i] for i in order], [owners[i] for i in order], world, align=ALIGN)
