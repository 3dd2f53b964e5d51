// The kernels of the emulated device: every CPU kernel that an accelerator would have, borrowed.
#ifndef TFLMS_EMULATOR_KERNELS_H_
#define TFLMS_EMULATOR_KERNELS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/memory_types.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/util.h"

namespace tflms {

constexpr char kDeviceType[] = "EMU";

inline bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Ops that no accelerator has kernels for: input pipelines, files, text, queues, tables, Python calls.
// Left out, they are placed on the CPU, as beside a GPU, and take no device memory.
inline bool RunsOnHostOnly(const tensorflow::OpDef& op) {
  for (const char* part : {"Dataset", "Iterator", "Queue", "HashTable", "LookupTable", "Reader", "Barrier"}) {
    if (Contains(op.name(), part)) return true;
  }
  if (op.name() == "PyFunc" || op.name() == "PyFuncStateless") return true;
  for (const auto& arg : op.input_arg()) {
    if (arg.type() == tensorflow::DT_STRING) return true;
  }
  for (const auto& arg : op.output_arg()) {
    if (arg.type() == tensorflow::DT_STRING) return true;
  }
  return false;
}

// The oneDNN twin of a node, or a node without an op where there is none. TensorFlow puts the twins in
// by a graph pass for CPU nodes alone; without them convolutions are several times slower and unfold
// into huge buffers. Grappler's fused ops (_FusedBatchNormEx) have no other kernel at all.
inline tensorflow::NodeDef OneDnnTwin(const tensorflow::NodeDef& node) {
  tensorflow::NodeDef twin;
  const std::string& op = node.op();
  bool wanted = op == "FusedBatchNormV3" || op == "FusedBatchNormGradV3" || op == "_FusedBatchNormEx";
  for (const char* family : {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "AvgPool", "_FusedConv",
                             "_FusedDepthwiseConv2dNative"}) {
    wanted = wanted || op.rfind(family, 0) == 0;
  }
  if (!wanted || !tensorflow::IsMKLEnabled()) return twin;
  const tensorflow::OpDef *plain = nullptr, *native = nullptr;
  tensorflow::OpRegistry* registry = tensorflow::OpRegistry::Global();
  if (!registry->LookUpOpDef(op, &plain).ok() ||
      !registry->LookUpOpDef("_MklNative" + op.substr(op[0] == '_'), &native).ok() ||
      plain->input_arg_size() != native->input_arg_size() ||
      plain->output_arg_size() != native->output_arg_size()) {
    return twin;
  }
  twin = node;
  twin.set_op(native->name());
  (*twin.mutable_attr())["_kernel"].set_s("MklNameChangeOp");
  tensorflow::AddDefaultsToNodeDef(*native, &twin);
  return twin;
}

// Makes the CPU kernel of a node, bound to the emulated device and its allocators.
class BorrowedCpuKernel : public tensorflow::kernel_factory::OpKernelFactory {
 public:
  tensorflow::OpKernel* Create(tensorflow::OpKernelConstruction* c) override {
    tensorflow::OpKernel* kernel = nullptr;
    const tensorflow::NodeDef twin = OneDnnTwin(c->def());
    if (!twin.op().empty() && Borrow(c, twin, &kernel).ok()) return kernel;
    absl::Status status = RefusePlaceholder(c->def());
    if (status.ok()) status = Borrow(c, c->def(), &kernel);
    if (!status.ok()) c->SetStatus(status);
    return kernel;
  }

 private:
  // Ops that only oneDNN can run are registered for the CPU with a kernel that does nothing.
  static absl::Status RefusePlaceholder(const tensorflow::NodeDef& node) {
    const tensorflow::OpDef* op = nullptr;
    const tensorflow::KernelDef* kernel = nullptr;
    std::string kernel_class;
    if (tensorflow::OpRegistry::Global()->LookUpOpDef(node.op(), &op).ok() && op->output_arg_size() > 0 &&
        tensorflow::FindKernelDef(tensorflow::DEVICE_CPU, node, &kernel, &kernel_class).ok() &&
        kernel_class == "NoOp") {
      return absl::UnimplementedError(
          absl::StrCat("TensorFlow has no kernel for ", node.op(), " (node ", node.name(),
                       ") that the emulated device could borrow"));
    }
    return absl::OkStatus();
  }

  static void MarkHostMemory(const tensorflow::MemoryTypeSlice& types, const char* attribute,
                             tensorflow::NodeDef* node) {
    tensorflow::AttrValue indices;
    indices.mutable_list();
    for (int i = 0; i < static_cast<int>(types.size()); ++i) {
      if (types[i] == tensorflow::HOST_MEMORY) indices.mutable_list()->add_i(i);
    }
    if (indices.list().i_size() > 0) (*node->mutable_attr())[attribute] = indices;
  }

  static absl::Status Borrow(tensorflow::OpKernelConstruction* c, tensorflow::NodeDef node,
                             tensorflow::OpKernel** kernel) {
    // On the CPU all memory counts as device memory; the kernel must know what is host memory here.
    MarkHostMemory(c->input_memory_types(), "_input_hostmem", &node);
    MarkHostMemory(c->output_memory_types(), "_output_hostmem", &node);
    std::shared_ptr<const tensorflow::NodeProperties> properties;
    absl::Status status = tensorflow::NodeProperties::CreateFromNodeDef(
        std::move(node), tensorflow::OpRegistry::Global(), &properties);
    if (!status.ok()) return status;
    return tensorflow::CreateOpKernel(
        tensorflow::DEVICE_CPU, c->device(), c->device()->GetAllocator(tensorflow::AllocatorAttributes()),
        c->function_library(), c->resource_manager(), properties, c->graph_def_version(), kernel);
  }
};

// Registers copies of one CPU kernel for the emulated device, such that int32 tensors stay on the host.
//
// TensorFlow assumes this of every accelerator at the borders of functions, and GPU kernels do it for
// nearly all ops, since int32 tensors are shapes and indices that steer kernels. A kernel definition
// cannot say "on the host if int32", so each set of type attributes that may be int32 gets a definition
// of its own, and the one with the most int32 attributes wins by priority.
class KernelCopies {
 public:
  KernelCopies(const tensorflow::KernelDef& cpu, const tensorflow::OpDef& op) : cpu_(cpu), op_(op) {}

  void Register() {
    const std::vector<std::string> attributes = Int32Attributes();
    for (unsigned chosen = 0; chosen < (1u << attributes.size()); ++chosen) {
      auto* copy = new tensorflow::KernelDef(cpu_);  // owned by the registry
      copy->set_device_type(kDeviceType);
      int count = 0;
      for (size_t i = 0; i < attributes.size(); ++i) {
        if (!(chosen >> i & 1u)) continue;
        ++count;
        Constrain(attributes[i], copy);
        AddHostArgs(attributes[i], copy);
      }
      AddFixedHostArgs(copy);
      copy->set_priority(cpu_.priority() * 16 + count);
      tensorflow::kernel_factory::OpKernelRegistrar(copy, "BorrowedCpuKernel",
                                                    std::make_unique<BorrowedCpuKernel>());
    }
  }

 private:
  // Ops that move a tensor in the memory they are told; the host's own counterparts are _Host...
  bool MovesDeviceMemory() const {
    return op_.name() == "_Send" || op_.name() == "_Recv" || op_.name() == "_DeviceArg" ||
           op_.name() == "_DeviceRetval";
  }

  bool AllowsInt32(const tensorflow::OpDef::AttrDef& attribute) const {
    const auto has = [](const tensorflow::AttrValue& allowed) {
      for (int type : allowed.list().type()) {
        if (type == tensorflow::DT_INT32) return true;
      }
      return false;
    };
    if (attribute.type() != "type") return false;
    if (attribute.has_allowed_values() && !has(attribute.allowed_values())) return false;
    for (const auto& constraint : cpu_.constraint()) {
      if (constraint.name() == attribute.name() && !has(constraint.allowed_values())) return false;
    }
    return true;
  }

  std::vector<std::string> Int32Attributes() const {
    std::vector<std::string> names;
    if (MovesDeviceMemory()) return names;
    for (const auto& attribute : op_.attr()) {
      if (AllowsInt32(attribute) && names.size() < 4) names.push_back(attribute.name());
    }
    return names;
  }

  static void Constrain(const std::string& attribute, tensorflow::KernelDef* copy) {
    tensorflow::KernelDef::AttrConstraint* constraint = nullptr;
    for (auto& existing : *copy->mutable_constraint()) {
      if (existing.name() == attribute) constraint = &existing;
    }
    if (constraint == nullptr) constraint = copy->add_constraint();
    constraint->set_name(attribute);
    auto* allowed = constraint->mutable_allowed_values()->mutable_list();
    allowed->clear_type();
    allowed->add_type(tensorflow::DT_INT32);
  }

  template <typename Matches>
  void AddArgs(const Matches& matches, tensorflow::KernelDef* copy) const {
    const auto add = [&](const tensorflow::OpDef::ArgDef& arg) {
      if (!matches(arg)) return;
      for (const std::string& known : copy->host_memory_arg()) {
        if (known == arg.name()) return;
      }
      copy->add_host_memory_arg(arg.name());
    };
    for (const auto& arg : op_.input_arg()) add(arg);
    for (const auto& arg : op_.output_arg()) add(arg);
  }

  void AddHostArgs(const std::string& attribute, tensorflow::KernelDef* copy) const {
    AddArgs([&](const auto& arg) { return arg.type_attr() == attribute; }, copy);
  }

  void AddFixedHostArgs(tensorflow::KernelDef* copy) const {
    const bool host = op_.name() == "_HostSend" || op_.name() == "_HostRecv";
    AddArgs([&](const auto& arg) { return host || arg.type() == tensorflow::DT_INT32; }, copy);
  }

  const tensorflow::KernelDef& cpu_;
  const tensorflow::OpDef& op_;
};

inline int RegisterKernels() {
  const tensorflow::KernelList kernels = tensorflow::GetFilteredRegisteredKernels(
      [](const tensorflow::KernelDef& kernel) { return kernel.device_type() == tensorflow::DEVICE_CPU; });
  int count = 0;
  for (const tensorflow::KernelDef& kernel : kernels.kernel()) {
    const tensorflow::OpDef* op = nullptr;
    if (!tensorflow::OpRegistry::Global()->LookUpOpDef(kernel.op(), &op).ok()) continue;
    if (RunsOnHostOnly(*op)) continue;
    KernelCopies(kernel, *op).Register();
    ++count;
  }
  return count;
}

}  // namespace tflms

#endif  // TFLMS_EMULATOR_KERNELS_H_
