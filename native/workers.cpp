#include "workers.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace tokenmill {

namespace {

// How long a helper looks for the next job before it sleeps: longer than what lies between two kernels of a step.
constexpr auto ATTENTION = std::chrono::microseconds(50);

inline void pause() { __builtin_ia32_pause(); }

class Workers {
 public:
  void run(int64_t count, int threads, DoPiece do_piece, const void* work) {
    if (taken_.exchange(true)) {
      for (int64_t i = 0; i < count; ++i) do_piece(work, i, i + 1);
      return;
    }
    while (helpers_ < threads - 1) add_helper();
    do_piece_ = do_piece;
    work_ = work;
    count_ = count;
    wanted_ = (threads < count ? threads : static_cast<int>(count)) - 1;
    unclaimed_.store(0, std::memory_order_relaxed);
    state_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
    take_pieces();
    state_.fetch_add(1);
    // Whoever came in before the line above has been counted; whoever came later has seen that the job is over.
    for (int i = 0; busy_.load() > 0; ++i) i < 1000 ? pause() : std::this_thread::yield();
    taken_.store(false);
  }

 private:
  std::atomic<bool> taken_{false};  // there is a job, or one is being made
  DoPiece do_piece_ = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0;
  int wanted_ = 0, helpers_ = 0;
  alignas(64) std::atomic<int64_t> unclaimed_{0};
  alignas(64) std::atomic<uint64_t> state_{0};  // odd: there is a job; the fields above do not change
  alignas(64) std::atomic<int> busy_{0};        // helpers that may be at a job
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable woken_;

  int64_t claim() { return unclaimed_.fetch_add(1, std::memory_order_relaxed); }

  void take_pieces() {
    for (int64_t i = claim(); i < count_;) {
      const int64_t next = claim();
      do_piece_(work_, i, next);
      i = next;
    }
  }

  void wake() {
    { const std::lock_guard<std::mutex> lock(sleep_); }
    woken_.notify_all();
  }

  void add_helper() {
    // Signals are for the threads of Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(&Workers::help, this, helpers_++).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help(int index) {
    for (uint64_t seen = 0;;) {
      seen = wait_for_job(seen);
      busy_.fetch_add(1);
      if (state_.load() == seen && index < wanted_) take_pieces();
      busy_.fetch_sub(1);
    }
  }

  static bool is_new_job(uint64_t state, uint64_t seen) { return state % 2 == 1 && state != seen; }

  uint64_t wait_for_job(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + ATTENTION;
    do {
      for (int i = 0; i < 32; ++i) {
        const uint64_t state = state_.load();
        if (is_new_job(state, seen)) return state;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    uint64_t state;
    woken_.wait(lock, [&] { return is_new_job(state = state_.load(), seen); });
    sleepers_.fetch_sub(1);
    return state;
  }
};

// Never freed: its threads end with the process.
std::atomic<Workers*> workers{nullptr};

Workers& the_workers() {
  static const bool made = [] {
    workers = new Workers;
    // A forked process has none of the threads.
    pthread_atfork(nullptr, nullptr, [] { workers = new Workers; });
    return true;
  }();
  static_cast<void>(made);
  return *workers;
}

}  // namespace

void run_pieces(int64_t count, int threads, DoPiece do_piece, const void* work) {
  the_workers().run(count, threads, do_piece, work);
}

}  // namespace tokenmill
