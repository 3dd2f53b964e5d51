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

#include "tensorflow/core/common_runtime/bfc_allocator.h"

namespace tflms {

// What is under way on the device and may give memory back: kernels, copies, and every event so far.
struct Activity {
  std::atomic<int64_t> events{0};
  std::atomic<int64_t> running_kernels{0};
  std::atomic<int64_t> pending_copies{0};
};

inline Activity& DeviceActivity() {
  static auto* activity = new Activity;
  return *activity;
}

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
    if (start != nullptr || nbytes == 0 || !attributes.retry_on_failure ||
        static_cast<int64_t>(nbytes) > *GetStats()->bytes_limit) {
      return start;
    }
    ++waiting_;
    for (const auto begin = Clock::now(); start == nullptr;) {
      const int64_t seen = frees_;
      start = tsl::BFCAllocator::AllocateRaw(alignment, nbytes, at_once);
      if (start == nullptr && !WaitForFree(seen, begin + kLongest)) break;
    }
    --waiting_;
    return start;
  }

  void DeallocateRaw(void* start) override {
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

  std::atomic<int64_t> frees_{0};
  std::atomic<int64_t> waiting_{0};
  std::mutex mu_;
  std::condition_variable freed_;
};

}  // namespace tflms

#endif  // TFLMS_EMULATOR_MEMORY_H_
