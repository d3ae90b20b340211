// Movers on a simulated link: bytes, order, small copies between packets, cancelled tasks.
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "raymoe/mover.h"

using namespace raymoe;

namespace {

constexpr MoverLimits kLimits{1000, 4096};

struct Movers {
  std::shared_ptr<SimulatedLink> link;
  std::shared_ptr<LinkMeter> meter = std::make_shared<LinkMeter>();
  Mover pages, small;

  Movers(double bytes_per_s, bool copies)
      : link(make_simulated_link(bytes_per_s, copies)),
        pages("pages", link, link->new_stream(Direction::kToDevice), Direction::kToDevice, kLimits,
              meter),
        small("small", link, link->new_stream(Direction::kToDevice), Direction::kToDevice, kLimits,
              meter) {}
};

MarkRef submit(Mover& mover, std::vector<Piece> pieces, std::vector<MarkRef> after = {}) {
  CopyJob job;
  job.pieces = std::move(pieces);
  job.after = std::move(after);
  job.mark = std::make_shared<Mark>();
  MarkRef mark = job.mark;
  mover.submit(std::move(job));
  return mark;
}

void a_chain_through_two_movers_copies_in_order() {
  Movers movers(0.0, true);
  constexpr int kCells = 200;
  std::vector<std::vector<char>> cells(kCells, std::vector<char>(3333));
  for (size_t i = 0; i < cells[0].size(); ++i) cells[0][i] = static_cast<char>(i * 7);
  MarkRef last;
  for (int cell = 1; cell < kCells; ++cell) {
    char* target = cells[static_cast<size_t>(cell)].data();
    const char* source = cells[static_cast<size_t>(cell - 1)].data();
    std::vector<MarkRef> after;
    if (last != nullptr) after.push_back(last);
    last = submit(cell % 2 ? movers.pages : movers.small, {{target, source, 3333}}, after);
  }
  CHECK(last->wait());
  CHECK(cells[kCells - 1] == cells[0]);
  movers.pages.close();
  movers.small.close();
  CHECK(movers.meter->read().first == 3333u * (kCells - 1));
}

void a_host_task_releases_a_copy_and_a_cancelled_one_cancels_it() {
  Movers movers(0.0, true);
  char source = 1, target = 0;
  auto first = std::make_shared<Mark>(), second = std::make_shared<Mark>();
  MarkRef copied = submit(movers.small, {{&target, &source, 1}}, {first});
  MarkRef cancelled = submit(movers.small, {{&target, &source, 1}}, {second});
  CHECK(!copied->wait_decided(0.01));
  first->finish(1.0, 2.0);
  CHECK(copied->wait());
  CHECK(target == 1);
  second->cancel("broken");
  CHECK(!cancelled->wait());
  CHECK(cancelled->error().empty() && second->error() == "broken");
}

void the_link_serves_streams_in_turn_and_interrupts_no_copy() {
  const auto link = make_simulated_link(1e4, false);
  void* pages = link->new_stream(Direction::kToDevice);
  void* small = link->new_stream(Direction::kToDevice);
  void* back = link->new_stream(Direction::kToHost);
  const auto copied = [&](void* stream, size_t num_bytes) {
    link->copy({{nullptr, nullptr, num_bytes}}, false, -1.0, stream);
    return link->record(stream);
  };
  // Nothing waits: the times are those at which the copies would end.
  const EventRef first = copied(pages, 1000), second = copied(pages, 1000);
  const EventRef one = copied(small, 100), two = copied(small, 100), third = copied(pages, 1000);
  const EventRef other = copied(back, 100);
  const auto time_s = [&](const EventRef& event) { return link->time_s(*event); };
  CHECK_NEAR(time_s(one) - time_s(first), 0.01, 1e-9);
  CHECK_NEAR(time_s(second) - time_s(one), 0.1, 1e-9);
  CHECK_NEAR(time_s(two) - time_s(second), 0.01, 1e-9);
  CHECK_NEAR(time_s(third) - time_s(two), 0.1, 1e-9);
  CHECK(time_s(other) < time_s(first));
  CHECK(!link->is_done(*third));
}

}  // namespace

int main() {
  a_chain_through_two_movers_copies_in_order();
  a_host_task_releases_a_copy_and_a_cancelled_one_cancels_it();
  the_link_serves_streams_in_turn_and_interrupts_no_copy();
  return 0;
}
