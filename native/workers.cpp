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

// How long a worker looks for the next job before it sleeps: longer than the pause between two kernels of a step.
constexpr auto SPIN_TIME = std::chrono::microseconds(50);

inline void pause() { __builtin_ia32_pause(); }

class Workers {
 public:
  void run(int64_t count, int threads, DoPiece do_piece, const void* work) {
    if (is_in_use_.exchange(true)) {
      for (int64_t i = 0; i < count; ++i) do_piece(work, i, i + 1);
      return;
    }
    while (started_ < threads - 1) start_worker();
    do_piece_ = do_piece;
    work_ = work;
    count_ = count;
    joining_ = (threads < count ? threads : static_cast<int>(count)) - 1;
    unclaimed_.store(0, std::memory_order_relaxed);
    state_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
    do_pieces();
    state_.fetch_add(1);
    // A worker that joined before the line above is counted in busy_; one that comes later sees that the job is over.
    for (int i = 0; busy_.load() > 0; ++i) i < 1000 ? pause() : std::this_thread::yield();
    is_in_use_.store(false);
  }

 private:
  std::atomic<bool> is_in_use_{false};  // there is a job, or one is being prepared
  DoPiece do_piece_ = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0;
  int joining_ = 0, started_ = 0;  // workers that this job is for; workers that were started
  alignas(64) std::atomic<int64_t> unclaimed_{0};
  alignas(64) std::atomic<uint64_t> state_{0};  // odd: there is a job, and the fields above do not change
  alignas(64) std::atomic<int> busy_{0};        // workers that may be doing pieces
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable woken_;

  int64_t claim() { return unclaimed_.fetch_add(1, std::memory_order_relaxed); }

  void do_pieces() {
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

  void start_worker() {
    // Signals go to the threads of Python: all are blocked in the new thread, which inherits the mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(&Workers::worker_loop, this, started_++).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void worker_loop(int index) {
    for (uint64_t seen = 0;;) {
      seen = wait_for_job(seen);
      busy_.fetch_add(1);
      if (state_.load() == seen && index < joining_) do_pieces();
      busy_.fetch_sub(1);
    }
  }

  static bool is_new_job(uint64_t state, uint64_t seen) { return state % 2 == 1 && state != seen; }

  uint64_t wait_for_job(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + SPIN_TIME;
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

Workers& process_workers() {
  static const bool made = [] {
    workers = new Workers;
    // A forked process has none of these threads, so it starts with none.
    pthread_atfork(nullptr, nullptr, [] { workers = new Workers; });
    return true;
  }();
  static_cast<void>(made);
  return *workers;
}

}  // namespace

void run_pieces(int64_t count, int threads, DoPiece do_piece, const void* work) {
  process_workers().run(count, threads, do_piece, work);
}

}  // namespace tokenmill
