// A device "pretend" for tests: the CPU's memory and kernels behind a dispatch key of its own.
//
// Like an accelerator it refuses operations that mix its tensors with the CPU's (other than numbers, of shape ()), and its
// tensors have no NumPy view. Like none, it is slow: most operations copy their tensors to the CPU and back.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using c10::DeviceType;
using Ints = c10::SymIntArrayRef;
constexpr auto kind = DeviceType::PrivateUse1;
const c10::Device the_device(kind, 0);

// ---- what PyTorch asks of a device ------------------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kind;
  DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, the_device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return false; }
};

// ---- tensors, their views and copies ----------------------------------------------------------------------------------

// The same memory as a CPU tensor; CPU tensors as they are.
Tensor on_cpu(const Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [](void*) {}, at::TensorOptions().dtype(t.dtype()));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

const Tensor& resize(const Tensor& self, Ints symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;  // strides and all
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto larger = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set(Tensor& self, at::Storage storage, c10::SymInt offset, Ints size, Ints stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  c10::SymInt entries = storage.nbytes() / self.itemsize(), one = 1;
  return set(self, storage, 0, Ints(&entries, 1), Ints(&one, 1));
}

Tensor as_strided(const Tensor& self, Ints size, Ints stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl_meta_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, Ints size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, Ints size, Ints stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sym_sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar number(const Tensor& self) { return at::native::_local_scalar_dense_cpu(on_cpu(self)); }

// ---- everything else, by the CPU's kernels ------------------------------------------------------------------------------

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto refuse = [&](const Tensor& t) {
    TORCH_CHECK(!t.defined() || !t.is_cpu() || t.dim() == 0, op.schema().name(), ": a CPU tensor among those of 'pretend'");
  };
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {  // indices may be on the CPU
    if (argument.isTensor()) refuse(argument.toTensor());
    if (argument.isTensorList()) for (const Tensor& t : argument.toTensorVector()) refuse(t);
  }
  at::native::cpu_fallback(op, stack, false);
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Ints stride, Ints padding,
                   Ints dilation, bool transposed, Ints output_padding, c10::SymInt groups) {
  bool has_bias = bias && bias->defined();
  TORCH_CHECK(weight.device() == x.device() && (!has_bias || bias->device() == x.device()), "convolution: mixed devices");
  at::AutoDispatchBelowAutograd below;
  return at::convolution_symint(on_cpu(x), on_cpu(weight), has_bias ? std::optional<Tensor>(on_cpu(*bias)) : std::nullopt,
                                stride, padding, dilation, transposed, output_padding, groups).to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& g, const Tensor& x, const Tensor& weight, Ints stride, Ints padding, Ints dilation, bool transposed,
    Ints output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  TORCH_CHECK(g.device() == x.device() && weight.device() == x.device(), "convolution_backward: mixed devices");
  at::AutoDispatchBelowAutograd below;
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [dx, dw, db] = at::convolution_backward_symint(on_cpu(g), on_cpu(x), on_cpu(weight), Ints(bias), stride, padding,
                                                      dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {back(dx), back(dw), back(db)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set);
  m.impl("set_.source_Storage", set_whole);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
