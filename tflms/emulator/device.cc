// The emulated accelerator, TensorFlow device type "EMU": the kernels of the CPU, a memory of its own.
//
// Nothing happens when the library is opened; tflms_emu_start() registers device and kernels, once, and
// before TensorFlow has made its devices.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "link.h"
#include "memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/public/version.h"

#ifndef TFLMS_TENSORFLOW_VERSION
#error "build.py defines TFLMS_TENSORFLOW_VERSION"
#endif

namespace tflms {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::Device;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::SessionOptions;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

std::atomic<DeviceMemory*> device_memory{nullptr};  // lives as long as the process

DeviceMemory& Memory() { return *device_memory.load(); }

// Each session and the eager runtime make a device object; all of them stand for one accelerator.
// LocalDevice is the base to take: ThreadPoolDevice would write "CPU" into the attributes.
class EmulatedDevice : public tensorflow::LocalDevice {
 public:
  EmulatedDevice(const SessionOptions& options, const std::string& name)
      : LocalDevice(options, Device::BuildDeviceAttributes(
                                 name, tensorflow::DeviceType(kDeviceType),
                                 tensorflow::Bytes(*Memory().GetStats()->bytes_limit),
                                 tensorflow::DeviceLocality(), "emulated accelerator")),
        link_(new LinkContext) {
    info_.default_context = link_.get();  // eager copies ask here, graph copies TryGetDeviceContext
    set_tensorflow_accelerator_device_info(&info_);
  }

  tensorflow::Allocator* GetAllocator(AllocatorAttributes attributes) override {
    if (attributes.on_host()) return tensorflow::cpu_allocator();
    return &Memory();
  }

  void Compute(OpKernel* kernel, OpKernelContext* context) override {
    Report::AwaitAll();
    if (kernel->type_string() == "_Send") {
      Report::Announce();
      Report report;
      kernel->Compute(context);
      return;
    }
    Activity& activity = DeviceActivity();
    ++activity.running_kernels;
    Loan& loan = ThreadLoan();
    loan = {/*possible=*/absl::StartsWith(kernel->type_string(), "_Mkl"), /*nbytes=*/0};
    kernel->Compute(context);
    if (loan.nbytes > 0) {
      context->SetStatus(absl::ResourceExhaustedError(
          absl::StrCat("OOM when allocating ", loan.nbytes, " bytes in ", kernel->name(), " on ",
                       name(), " by allocator EMU_0_bfc")));
    }
    loan = {};
    --activity.running_kernels;
    ++activity.events;
  }

  absl::Status TryGetDeviceContext(tensorflow::DeviceContext** context) override {
    link_->Ref();
    *context = link_.get();
    return absl::OkStatus();
  }

  // Kernels have finished when they return, and copies announce themselves: nothing to wait for.
  absl::Status Sync() override { return absl::OkStatus(); }

  absl::Status MakeTensorFromProto(const tensorflow::TensorProto& proto,
                                   const AllocatorAttributes attributes, Tensor* tensor) override {
    Tensor parsed(proto.dtype());
    if (!parsed.FromProto(tensorflow::cpu_allocator(), proto)) {
      return absl::InvalidArgumentError("cannot parse the tensor of a constant");
    }
    if (attributes.on_host() || !tensorflow::DataTypeCanUseMemcpy(proto.dtype())) {
      *tensor = std::move(parsed);
      return absl::OkStatus();
    }
    Tensor constant(GetAllocator(attributes), parsed.dtype(), parsed.shape());
    if (parsed.NumElements() > 0 && !constant.IsInitialized()) {
      return absl::ResourceExhaustedError(absl::StrCat("OOM when allocating a constant of shape ",
                                                       parsed.shape().DebugString(), " on ", name()));
    }
    const absl::Status status = CopyBytes(parsed, &constant);
    *tensor = std::move(constant);
    return status;
  }

  void CopyTensorInSameDevice(const Tensor* from, Tensor* to, const tensorflow::DeviceContext*,
                              StatusCallback done) override {
    done(CopyBytes(*from, to));
  }

 private:
  tensorflow::core::RefCountPtr<LinkContext> link_;
  tensorflow::DeviceBase::AcceleratorDeviceInfo info_;
};

class EmulatedDeviceFactory : public tensorflow::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->push_back("/physical_device:EMU:0");
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    const auto& counts = options.config.device_count();
    const auto count = counts.find(kDeviceType);
    if (count != counts.end() && count->second == 0) return absl::OkStatus();
    devices->push_back(std::make_unique<EmulatedDevice>(options, prefix + "/device:EMU:0"));
    return absl::OkStatus();
  }
};

}  // namespace
}  // namespace tflms

extern "C" {

struct tflms_emu_statistics {
  int64_t bytes_in_use, peak_bytes, limit_bytes;
  int64_t to_host_bytes, to_device_bytes, to_host_copies, to_device_copies;
  double to_host_seconds, to_device_seconds;
};

// What the library was built for, and what its headers say: both must agree with the running process.
const char* tflms_emu_tensorflow_version() { return TFLMS_TENSORFLOW_VERSION; }
int tflms_emu_graph_def_version() { return TF_GRAPH_DEF_VERSION; }

// Registers the device; the number of kernels, or -1 when it is registered already.
int tflms_emu_start(int64_t memory_bytes) {
  static std::atomic<bool> started{false};
  if (started.exchange(true)) return -1;
  tflms::device_memory = new tflms::DeviceMemory(memory_bytes);
  const int kernels = tflms::RegisterKernels();
  // A higher priority than the CPU's 60: ops without a device go to the accelerator.
  tensorflow::DeviceFactory::Register(tflms::kDeviceType,
                                      std::make_unique<tflms::EmulatedDeviceFactory>(),
                                      /*priority=*/200, /*is_pluggable_device=*/false);
  return kernels;
}

void tflms_emu_set_link(double to_host_bytes_per_second, double to_device_bytes_per_second) {
  tflms::ToHost().bytes_per_second = to_host_bytes_per_second;
  tflms::ToDevice().bytes_per_second = to_device_bytes_per_second;
}

void tflms_emu_statistics_now(tflms_emu_statistics* out) {
  const auto memory = tflms::Memory().GetStats();
  const auto& out_engine = tflms::ToHost();
  const auto& in_engine = tflms::ToDevice();
  out->bytes_in_use = memory->bytes_in_use;
  out->peak_bytes = memory->peak_bytes_in_use;
  out->limit_bytes = *memory->bytes_limit;
  out->to_host_bytes = out_engine.bytes;
  out->to_host_copies = out_engine.copies;
  out->to_host_seconds = 1e-9 * out_engine.busy_nanoseconds;
  out->to_device_bytes = in_engine.bytes;
  out->to_device_copies = in_engine.copies;
  out->to_device_seconds = 1e-9 * in_engine.busy_nanoseconds;
}

// The peak falls back to what is in use now; the copy engines start counting at zero.
void tflms_emu_reset_statistics() {
  tflms::Memory().ClearStats();
  tflms::ToHost().Reset();
  tflms::ToDevice().Reset();
}

}  // extern "C"
