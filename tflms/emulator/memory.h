// The memory of the emulated device: TensorFlow's own BFC allocator over a region of fixed size.
#ifndef TFLMS_EMULATOR_MEMORY_H_
#define TFLMS_EMULATOR_MEMORY_H_

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "tensorflow/core/common_runtime/bfc_allocator.h"

namespace tflms {

// What is under way on the device and may give memory back: kernels, copies, and every event so far.
struct Activity {
  std::atomic<int64_t> events{0};
  std::atomic<int64_t> running_kernels{0};
  std::atomic<int64_t> pending_copies{0};
  std::atomic<int64_t> reports{0};
};

inline Activity& DeviceActivity() {
  static auto* activity = new Activity;
  return *activity;
}

// While one lives, its thread of the host hands a copy to the link, or tells that one is done. Until it has
// done so, TensorFlow holds the buffer. Kernels take no core from the host where there is an accelerator;
// here a thread that they push aside would hold a buffer for as long as dozens of small kernels run.
class Report {
 public:
  static void Announce() { ++DeviceActivity().reports; }

  Report() { OfThread() = this; }  // one that was announced
  ~Report() { End(); }

  // Before a kernel starts. Not for ever: whoever is told may do anything.
  static void AwaitAll() {
    if (OfThread() != nullptr) OfThread()->End();  // what its thread runs itself is no part of it
    for (int tries = 0; DeviceActivity().reports > 0 && tries < 1000; ++tries) {
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }

 private:
  void End() {
    if (OfThread() != this) return;
    OfThread() = nullptr;
    --DeviceActivity().reports;
  }

  static Report*& OfThread() {
    static thread_local Report* report = nullptr;
    return report;
  }
};

// Address space apart from the host's heap. Pages become real when they are first written.
class Region : public tsl::SubAllocator {
 public:
  Region() : tsl::SubAllocator({}, {}) {}

  void* Alloc(size_t /*alignment*/, size_t nbytes, size_t* received) override {
    void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *received = nbytes;
    if (start == MAP_FAILED) return nullptr;
    madvise(start, nbytes, MADV_HUGEPAGE);  // a hint: first touches cost a fraction
    return start;
  }
  void Free(void* start, size_t nbytes) override { munmap(start, nbytes); }
  bool SupportsCoalescing() const override { return false; }
};

// oneDNN kernels do not look whether an allocation failed. While one runs, memory that the device does
// not have is lent to it from the host, and the kernel is failed once it has returned.
struct Loan {
  bool possible = false;  // a kernel runs in this thread that would crash without
  size_t nbytes = 0;      // what was lent to it
};

inline Loan& ThreadLoan() {
  static thread_local Loan loan;
  return loan;
}

// A full device makes an allocation wait for memory that running kernels or copies are about to give
// back, as on a GPU. TensorFlow's own waiting always lasts ten seconds before it reports that memory
// has run out; this one ends as soon as nothing has moved on the device for kQuiet.
class DeviceMemory : public tsl::BFCAllocator {
 public:
  explicit DeviceMemory(int64_t nbytes)
      : tsl::BFCAllocator(std::make_unique<Region>(), nbytes, "EMU_0_bfc", FixedSize(nbytes)) {}

  using tsl::BFCAllocator::AllocateRaw;
  void* AllocateRaw(size_t alignment, size_t nbytes,
                    const tsl::AllocationAttributes& attributes) override {
    tsl::AllocationAttributes at_once(/*retry_on_failure=*/false, attributes.allocation_will_be_logged,
                                      attributes.freed_by_func);
    void* start = tsl::BFCAllocator::AllocateRaw(alignment, nbytes, at_once);
    if (start != nullptr || nbytes == 0) return start;
    if (!attributes.retry_on_failure || static_cast<int64_t>(nbytes) > *GetStats()->bytes_limit) {
      return Lend(nbytes);
    }
    ++waiting_;
    for (const auto begin = Clock::now(); start == nullptr;) {
      const int64_t seen = frees_;
      start = tsl::BFCAllocator::AllocateRaw(alignment, nbytes, at_once);
      if (start == nullptr && !WaitForFree(seen, begin + kLongest)) break;
    }
    --waiting_;
    return start != nullptr ? start : Lend(nbytes);
  }

  size_t RequestedSize(const void* start) const override {
    const size_t lent = LentSize(start);
    return lent ? lent : tsl::BFCAllocator::RequestedSize(start);
  }
  size_t AllocatedSize(const void* start) const override {
    const size_t lent = LentSize(start);
    return lent ? lent : tsl::BFCAllocator::AllocatedSize(start);
  }
  int64_t AllocationId(const void* start) const override {
    return LentSize(start) ? 0 : tsl::BFCAllocator::AllocationId(start);
  }

  void DeallocateRaw(void* start) override {
    if (TakeBack(start)) return;
    tsl::BFCAllocator::DeallocateRaw(start);
    ++frees_;
    if (waiting_ > 0) {
      std::lock_guard<std::mutex> lock(mu_);
      freed_.notify_all();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kQuiet{1000};
  static constexpr std::chrono::seconds kLongest{60};

  // TensorFlow hands out a free chunk whole, up to twice the request, unless 128 MiB would be left over.
  // That is little beside a GPU's 16 GiB, but here it would blur peaks by a tenth, and by another tenth
  // in a memory of another size. Splitting for 64 KiB makes a peak what the kernels asked for.
  static Options FixedSize(int64_t nbytes) {
    Options options;
    options.allow_growth = false;
    options.fragmentation_fraction = 65536.0 / nbytes;
    return options;
  }

  void* Lend(size_t nbytes) {
    Loan& loan = ThreadLoan();
    if (!loan.possible) return nullptr;
    void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    loan.nbytes += nbytes;
    std::lock_guard<std::mutex> lock(lent_mu_);
    lent_[start] = nbytes;
    ++lent_count_;
    return start;
  }

  size_t LentSize(const void* start) const {
    if (lent_count_ == 0) return 0;
    std::lock_guard<std::mutex> lock(lent_mu_);
    const auto found = lent_.find(start);
    return found == lent_.end() ? 0 : found->second;
  }

  bool TakeBack(void* start) {
    if (lent_count_ == 0) return false;
    std::lock_guard<std::mutex> lock(lent_mu_);
    const auto found = lent_.find(start);
    if (found == lent_.end()) return false;
    munmap(start, found->second);
    lent_.erase(found);
    --lent_count_;
    return true;
  }

  // True when something was freed since `seen`; false when nothing on the device can free any more.
  bool WaitForFree(int64_t seen, Clock::time_point deadline) {
    Activity& activity = DeviceActivity();
    int64_t events = activity.events;
    auto quiet_since = Clock::now();
    std::unique_lock<std::mutex> lock(mu_);
    while (frees_ == seen) {
      freed_.wait_for(lock, std::chrono::milliseconds(20));
      const auto now = Clock::now();
      const bool moving = activity.events != events || activity.pending_copies > 0 ||
                          activity.running_kernels > waiting_;
      if (moving) {
        events = activity.events;
        quiet_since = now;
      }
      if (frees_ == seen && (now - quiet_since > kQuiet || now > deadline)) return false;
    }
    return true;
  }

  mutable std::mutex lent_mu_;
  std::unordered_map<const void*, size_t> lent_;
  std::atomic<int64_t> lent_count_{0};
  std::atomic<int64_t> frees_{0};
  std::atomic<int64_t> waiting_{0};
  std::mutex mu_;
  std::condition_variable freed_;
};

}  // namespace tflms

#endif  // TFLMS_EMULATOR_MEMORY_H_
