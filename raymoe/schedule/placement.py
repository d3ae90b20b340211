"""Where the weights of a layer are, as builders, cost model and memory read it."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

from raymoe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """What of one layer streams in which pages, and what stays where.

    Cores may compute the last experts of a layer where they lie in host memory (`host_experts`).
    The last task of each launch then adds their sums to those of the device's groups.

    Attributes:
        page_bytes: Bytes of each page to load for a step, in order; empty if nothing streams.
        attention_pages: Pages that hold what `pre` and `post` read, ascending.
        expert_pages: Pages that hold what `experts` reads, ascending; a page may be in both.
        group_pages: The last pages, by group of experts, where experts are loaded and computed
            group by group; empty where they are computed at once. The pages before these are the
            common ones.
        group_bounds: The first expert of each group that the device computes, and the number of
            these experts; empty where there are no groups. Resident experts are in the first one.
        num_experts: Experts of the layer, 1 in a dense one.
        resident_experts: Experts that the device holds; these are the first ones.
        is_common_resident: Whether the device holds attention part and shared expert.
        host_experts: Experts that cores compute: the last ones of the layer.
        num_host_pages: Pages after all others that hold only such experts: not loaded.
        states_on_device: Whether the device has states of all rows in place of KV: attention is
            nowhere else then.

    Raises:
        ConfigError: Pages are unordered, missing or unread.
    """

    page_bytes: tuple[int, ...] = ()
    attention_pages: tuple[int, ...] = ()
    expert_pages: tuple[int, ...] = ()
    group_pages: tuple[tuple[int, ...], ...] = ()
    group_bounds: tuple[int, ...] = ()
    num_experts: int = 1
    resident_experts: int = 0
    is_common_resident: bool = False
    host_experts: range = range(0)
    num_host_pages: int = 0
    states_on_device: bool = False

    def __post_init__(self) -> None:
        if self.num_host_pages and not self.host_experts:
            raise ConfigError(
                f"num_host_pages is {self.num_host_pages}, but host_experts is empty; pages are "
                "left out only for experts that the cores compute"
            )
        for name in ("attention_pages", "expert_pages"):
            pages: tuple[int, ...] = getattr(self, name)
            if list(pages) != sorted(set(pages)):
                raise ConfigError(f"{name} is {pages}; pages are listed once, in ascending order")
        used = {*self.attention_pages, *self.expert_pages}
        if used != set(range(self.num_pages)):
            raise ConfigError(
                f"attention_pages {self.attention_pages} and expert_pages {self.expert_pages} "
                f"name {len(used)} pages; together they must name each of the {self.num_pages} "
                "pages, counted from 0"
            )
        grouped = [page for pages in self.group_pages for page in pages]
        if grouped != list(range(self.num_common_pages, self.num_pages)) or not all(
            self.group_pages
        ):
            raise ConfigError(
                f"group_pages is {self.group_pages}; each group has a page, and together they are "
                f"the last of {self.num_pages} pages"
            )

    @property
    def num_pages(self) -> int:
        return len(self.page_bytes)

    @property
    def num_common_pages(self) -> int:
        return self.group_pages[0][0] if self.group_pages else self.num_pages

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes that stream of what is in no group, and of each group."""
        groups = [sum(self.page_bytes[page] for page in pages) for pages in self.group_pages]
        return (sum(self.page_bytes) - sum(groups), *groups)

    @property
    def num_device_groups(self) -> int:
        """Tasks of a launch in which the device computes experts."""
        return max(len(self.group_pages), self.host_experts.start > 0 or not self.host_experts)

    @property
    def num_groups(self) -> int:
        """Tasks of a launch; where cores compute experts, the last one adds their sums."""
        return self.num_device_groups + bool(self.host_experts)

    @property
    def groups(self) -> tuple[range, ...]:
        """The experts of each group that the device computes."""
        return tuple(range(begin, end) for begin, end in pairwise(self.group_bounds))

    @cached_property
    def group_shares(self) -> tuple[float, ...]:
        """The share of the layer's experts in each group."""
        return tuple(len(group) / self.num_experts for group in self.groups)

    @property
    def host_share(self) -> float:
        """The share of the layer's experts that cores compute."""
        return len(self.host_experts) / self.num_experts

    def without_pages(self) -> Self:
        """The same division of work with nothing to load, all groups of the device in one."""
        end = self.host_experts.start
        return type(self)(
            group_bounds=(0, end) if self.host_experts and end else (),
            num_experts=self.num_experts,
            host_experts=self.host_experts,
            states_on_device=self.states_on_device,
        )

    def without_sizes(self) -> Self:
        """What decides which tasks a step has: pages of no size, some experts on the cores."""
        first = min(1, self.host_experts.start)
        return replace(
            self,
            page_bytes=(0,) * self.num_pages,
            group_bounds=(),
            num_experts=1,
            resident_experts=0,
            is_common_resident=False,
            host_experts=range(first, first + bool(self.host_experts)),
            num_host_pages=min(1, self.num_host_pages),
        )
