// The worker pool: every worker and every task once, errors surface, pools can be replaced.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "raymoe/worker_pool.h"

using raymoe::WorkerPool;

namespace {

void every_worker_runs_once_per_launch() {
  WorkerPool pool(4);
  for (int launch = 0; launch < 2000; ++launch) {
    std::vector<std::atomic<int>> calls(4);
    pool.run([&](int worker) { calls[static_cast<size_t>(worker)]++; });
    for (auto& count : calls) CHECK(count == 1);
  }
}

void workers_that_went_to_sleep_wake_up() {
  WorkerPool pool(3);
  std::atomic<int> calls{0};
  for (int launch = 0; launch < 5; ++launch) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pool.run([&](int) { calls++; });
  }
  CHECK(calls == 15);
}

void every_task_runs_once() {
  WorkerPool pool(3);
  for (int64_t num_tasks : {0, 1, 2, 7, 1000})
    for (int64_t grain : {1, 3, 2000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(num_tasks));
      pool.for_each(num_tasks, grain,
                    [&](int, int64_t task) { calls[static_cast<size_t>(task)]++; });
      for (auto& count : calls) CHECK(count == 1);
    }
}

void tasks_are_done_whoever_joins() {
  WorkerPool pool(4);
  for (int launch = 0; launch < 3000; ++launch) {
    if (launch % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // all sleep
    std::atomic<int> next{0}, calls{0};
    pool.run_awake([&](int) {
      while (next++ < launch % 5) calls++;
    });
    CHECK(calls == launch % 5);
    calls = 0;
    pool.run([&](int) { calls++; });
    CHECK(calls == 4);
  }
}

void a_launch_of_tasks_ends_before_all_workers_are_awake() {
  WorkerPool pool(16);
  int calls = 0;
  for (int launch = 0; launch < 50; ++launch) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> awake{0};
    pool.run_awake([&](int) { awake++; });
    calls += awake;
  }
  CHECK(calls >= 50 && calls < 50 * 16);
}

void the_first_error_surfaces_and_the_pool_survives() {
  WorkerPool pool(2);
  CHECK_THROWS(pool.run([](int worker) {
    if (worker == 1) throw std::runtime_error("worker 1");
  }));
  int calls = 0;
  pool.for_each(10, 10, [&](int, int64_t) { calls++; });
  CHECK(calls == 10);
}

void several_threads_may_launch() {
  WorkerPool pool(2);
  std::atomic<int> calls{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int launch = 0; launch < 200; ++launch) pool.run([&](int) { calls++; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(calls == 4 * 200 * 2);
}

void bad_sizes_are_refused() {
  CHECK_THROWS(WorkerPool(0));
  CHECK_THROWS(raymoe::set_num_threads(-1));
  raymoe::set_num_threads(2);
  CHECK(raymoe::worker_pool()->num_threads() == 2);
}

void count_tasks() {
  std::atomic<int> calls{0};
  raymoe::worker_pool()->for_each(100, 1, [&](int, int64_t) { calls++; });
  CHECK(calls == 100);
}

void a_fork_has_a_pool_of_its_own_and_ends() {
  raymoe::set_num_threads(3);
  count_tasks();
  for (const bool is_used : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // against waiting for ever
      if (is_used) count_tasks();
      std::exit(0);  // runs the destructors
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  count_tasks();
}

}  // namespace

int main() {
  every_worker_runs_once_per_launch();
  workers_that_went_to_sleep_wake_up();
  every_task_runs_once();
  tasks_are_done_whoever_joins();
  a_launch_of_tasks_ends_before_all_workers_are_awake();
  the_first_error_surfaces_and_the_pool_survives();
  several_threads_may_launch();
  bad_sizes_are_refused();
  a_fork_has_a_pool_of_its_own_and_ends();
  return 0;
}
