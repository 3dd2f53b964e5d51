// The link between host and device: one copy engine a direction, each with a settable rate.
#ifndef TFLMS_EMULATOR_LINK_H_
#define TFLMS_EMULATOR_LINK_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "memory.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tflms {

inline absl::Status CopyBytes(const tensorflow::Tensor& source, tensorflow::Tensor* target) {
  if (!tensorflow::DataTypeCanUseMemcpy(source.dtype())) {
    return absl::InternalError("the emulated link moves plain bytes only; this tensor lives on the host");
  }
  if (source.TotalBytes() != target->TotalBytes()) {
    return absl::InternalError("source and target of a copy differ in size");
  }
  if (source.TotalBytes() > 0) {
    std::memcpy(const_cast<char*>(target->tensor_data().data()), source.tensor_data().data(),
                source.TotalBytes());
  }
  return absl::OkStatus();
}

// Copies run one after another on the engine's own thread. What waits for a copy goes on in a small
// pool, so that it never delays the next copy.
class CopyEngine {
 public:
  CopyEngine() {
    std::thread([this] { Loop(); }).detach();
  }

  // Returns at once. The engine holds the source until its bytes have arrived: TensorFlow keeps only
  // the target alive, and the memory would be handed out again under the copy.
  void Enqueue(const tensorflow::Tensor& source, tensorflow::Tensor* target,
               tensorflow::StatusCallback done) {
    ++DeviceActivity().pending_copies;
    std::lock_guard<std::mutex> lock(mu_);
    queue_.push_back({source, target, std::move(done), Clock::now()});
    wake_.notify_one();
  }

  void Reset() { bytes = copies = busy_nanoseconds = 0; }

  std::atomic<double> bytes_per_second{0};  // 0: as fast as memcpy
  std::atomic<int64_t> bytes{0}, copies{0}, busy_nanoseconds{0};

 private:
  using Clock = std::chrono::steady_clock;

  struct Copy {
    tensorflow::Tensor source;
    tensorflow::Tensor* target;
    tensorflow::StatusCallback done;
    Clock::time_point queued;
  };

  static tensorflow::thread::ThreadPool& Continuations() {
    static auto* pool =
        new tensorflow::thread::ThreadPool(tensorflow::Env::Default(), "tflms_emu_copied", 4);
    return *pool;
  }

  void Loop() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mu_);
      wake_.wait(lock, [this] { return !queue_.empty(); });
      Copy copy = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      Run(std::move(copy));
    }
  }

  void Run(Copy copy) {
    // A copy that had to queue starts when the link fell free, so that oversleeping does not add up.
    const auto start = std::max(free_, copy.queued);
    const int64_t nbytes = copy.source.TotalBytes();
    const absl::Status status = CopyBytes(copy.source, copy.target);
    auto end = Clock::now();
    if (const double rate = bytes_per_second; rate > 0) {
      const auto due = start + std::chrono::nanoseconds(static_cast<int64_t>(1e9 * nbytes / rate));
      std::this_thread::sleep_until(due);
      end = std::max(end, due);
    }
    free_ = end;
    bytes += nbytes;
    ++copies;
    busy_nanoseconds += std::chrono::nanoseconds(end - start).count();
    copy.source = tensorflow::Tensor();  // before anyone hears of it: the memory is free from now on
    --DeviceActivity().pending_copies;
    ++DeviceActivity().events;
    Report::Announce();
    Continuations().Schedule([done = std::move(copy.done), status] {
      Report report;
      done(status);
    });
  }

  std::mutex mu_;
  std::condition_variable wake_;
  std::deque<Copy> queue_;
  Clock::time_point free_{};  // touched by the engine's thread alone
};

inline CopyEngine& ToHost() {
  static auto* engine = new CopyEngine;
  return *engine;
}

inline CopyEngine& ToDevice() {
  static auto* engine = new CopyEngine;
  return *engine;
}

// How TensorFlow asks for copies.
class LinkContext : public tensorflow::DeviceContext {
 public:
  void CopyCPUTensorToDevice(const tensorflow::Tensor* host, tensorflow::Device*,
                             tensorflow::Tensor* device, tensorflow::StatusCallback done,
                             bool /*sync_dst_compute*/) const override {
    ToDevice().Enqueue(*host, device, std::move(done));
  }
  void CopyDeviceTensorToCPU(const tensorflow::Tensor* device, absl::string_view,
                             tensorflow::Device*, tensorflow::Tensor* host,
                             tensorflow::StatusCallback done) override {
    ToHost().Enqueue(*device, host, std::move(done));
  }
  void CopyTensorInSameDevice(const tensorflow::Tensor* from, tensorflow::Device*,
                              tensorflow::Tensor* to,
                              tensorflow::StatusCallback done) const override {
    done(CopyBytes(*from, to));
  }
};

}  // namespace tflms

#endif  // TFLMS_EMULATOR_LINK_H_
