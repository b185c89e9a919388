// A ggml device for attention: ggml's scheduler gives it the operations that it says it can do.
//
// ggml's tables for devices are not among the headers that llama-cpp-python ships. They are spelled out here, as they
// are in the one version that this is built against; `api_version` is theirs.

#include "tidemill/ggml_device.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <cstring>
#include <utility>

namespace tidemill {
namespace {

constexpr int kApiVersion = 2;
using Unused = void (*)();

struct BackendTable {
  const char* (*name)(ggml_backend_t);
  void (*free)(ggml_backend_t);
  Unused set_async, get_async, set_2d_async, get_2d_async, copy_async, synchronize;
  Unused plan_create, plan_free, plan_update, plan_compute;
  ggml_status (*compute)(ggml_backend_t, ggml_cgraph*);
  Unused event_record, event_wait, optimize;
};

struct Backend {
  ggml_guid_t guid;
  BackendTable table;
  ggml_backend_dev_t device;
  int* threads;
};

struct DeviceTable {
  const char* (*name)(ggml_backend_dev_t);
  const char* (*description)(ggml_backend_dev_t);
  void (*memory)(ggml_backend_dev_t, std::size_t* free, std::size_t* total);
  enum ggml_backend_dev_type (*type)(ggml_backend_dev_t);
  void (*properties)(ggml_backend_dev_t, ggml_backend_dev_props*);
  ggml_backend_t (*open)(ggml_backend_dev_t, const char*);
  ggml_backend_buffer_type_t (*buffers)(ggml_backend_dev_t);
  Unused host_buffers, from_pointer;
  bool (*can)(ggml_backend_dev_t, const ggml_tensor*);
  bool (*reads)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
  Unused offload, event_new, event_free, event_wait;
};

struct Device {
  DeviceTable table;
  ggml_backend_reg_t registry;
  void* context;
};

struct RegistryTable {
  const char* (*name)(ggml_backend_reg_t);
  std::size_t (*count)(ggml_backend_reg_t);
  ggml_backend_dev_t (*device)(ggml_backend_reg_t, std::size_t);
  void* (*function)(ggml_backend_reg_t, const char*);
};

struct Registry {
  int api_version;
  RegistryTable table;
  void* context;
};

constexpr const char* kName = "tidemill-attention";
std::vector<Beginning> beginnings;

bool is_view(const ggml_tensor* op) {
  return op->op == GGML_OP_NONE || op->op == GGML_OP_RESHAPE || op->op == GGML_OP_VIEW || op->op == GGML_OP_PERMUTE ||
         op->op == GGML_OP_TRANSPOSE;
}

float parameter(const ggml_tensor* op, std::size_t i) {
  float value = 0;
  std::memcpy(&value, op->op_params + i, sizeof value);
  return value;
}

bool can(ggml_backend_dev_t, const ggml_tensor* op) {
  if (op->op != GGML_OP_FLASH_ATTN_EXT) return is_view(op);
  const ggml_tensor* q = op->src[0];
  const ggml_tensor* k = op->src[1];
  const ggml_tensor* v = op->src[2];
  const ggml_tensor* mask = op->src[3];
  const bool plain = parameter(op, 1) == 0.0F && parameter(op, 2) == 0.0F && op->src[4] == nullptr;  // bias, cap, sinks
  const bool types = q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16;
  const bool shapes = attends(static_cast<std::size_t>(q->ne[0])) && k->ne[0] == q->ne[0] && v->ne[0] == q->ne[0] &&
                      q->ne[2] % k->ne[2] == 0 && v->ne[2] == k->ne[2] && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3];
  const bool steps = q->nb[0] == sizeof(float) && k->nb[0] == sizeof(ggml_fp16_t) && v->nb[0] == sizeof(ggml_fp16_t);
  const bool masked = mask == nullptr || (mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) &&
                                          mask->ne[2] == 1 && (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]));
  return plain && types && shapes && steps && masked && ggml_is_contiguous(op);
}

/// The number of the stream that a view of a layer's keys begins with.
std::size_t first_stream(const ggml_tensor* k) {
  const ggml_tensor* whole = k;
  while (whole->view_src != nullptr) whole = whole->view_src;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(k->data) - static_cast<const char*>(whole->data));
  return k->nb[3] == 0 ? 0 : offset / k->nb[3];
}

void compute(ggml_tensor* op, int threads) {
  const ggml_tensor* q = op->src[0];
  const ggml_tensor* k = op->src[1];
  const ggml_tensor* v = op->src[2];
  const ggml_tensor* mask = op->src[3];
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  Attention a{};
  a.size = size(q->ne[0]);
  a.queries = size(q->ne[1]);
  a.heads = size(q->ne[2]);
  a.streams = size(q->ne[3]);
  a.keys = size(k->ne[1]);
  a.kv_heads = size(k->ne[2]);
  a.scale = parameter(op, 0);
  a.q = static_cast<const char*>(q->data);
  a.q_query = q->nb[1], a.q_head = q->nb[2], a.q_stream = q->nb[3];
  a.k = static_cast<const char*>(k->data);
  a.k_key = k->nb[1], a.k_head = k->nb[2], a.k_stream = k->nb[3];
  a.v = static_cast<const char*>(v->data);
  a.v_key = v->nb[1], a.v_head = v->nb[2], a.v_stream = v->nb[3];
  if (mask != nullptr) {
    a.mask = static_cast<const char*>(mask->data);
    a.mask_query = mask->nb[1];
    a.mask_stream = mask->ne[3] == 1 ? 0 : mask->nb[3];
  }
  a.out = static_cast<float*>(op->data);
  const std::size_t first = first_stream(k);
  if (a.streams > 1 && first + a.streams <= beginnings.size()) a.beginnings = beginnings.data() + first;
  attend(a, threads);
}

ggml_status compute_all(ggml_backend_t backend, ggml_cgraph* graph) {
  const int threads = *reinterpret_cast<Backend*>(backend)->threads;
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    const bool wanted = (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
    if (wanted && node->op == GGML_OP_FLASH_ATTN_EXT) compute(node, threads);
  }
  return GGML_STATUS_SUCCESS;
}

void set_threads(ggml_backend_t backend, int threads) { *reinterpret_cast<Backend*>(backend)->threads = threads; }

void close(ggml_backend_t backend) {
  auto* ours = reinterpret_cast<Backend*>(backend);
  delete ours->threads;
  delete ours;
}

ggml_backend_t open(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {'t', 'i', 'd', 'e', 'm', 'i', 'l', 'l', 'a', 't', 't', 'e', 'n', 'd', 0, 1};
  auto* backend = new Backend{&guid, {}, device, new int(1)};
  backend->table.name = [](ggml_backend_t) { return kName; };
  backend->table.free = close;
  backend->table.compute = compute_all;
  return reinterpret_cast<ggml_backend_t>(backend);
}

void properties(ggml_backend_dev_t, ggml_backend_dev_props* to) {
  *to = {};
  to->name = to->description = kName;
  to->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

Registry* registry();

Device* device() {
  static Device one = [] {
    Device made{};
    made.table.name = made.table.description = [](ggml_backend_dev_t) { return kName; };
    made.table.memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) { *free = *total = 0; };
    made.table.type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    made.table.properties = properties;
    made.table.open = open;
    made.table.buffers = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    made.table.can = can;
    made.table.reads = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(type); };
    made.registry = reinterpret_cast<ggml_backend_reg_t>(registry());
    return made;
  }();
  return &one;
}

Registry* registry() {
  static Registry one = [] {
    Registry made{kApiVersion, {}, nullptr};
    made.table.name = [](ggml_backend_reg_t) { return kName; };
    made.table.count = [](ggml_backend_reg_t) -> std::size_t { return 1; };
    made.table.device = [](ggml_backend_reg_t, std::size_t) { return reinterpret_cast<ggml_backend_dev_t>(device()); };
    made.table.function = [](ggml_backend_reg_t, const char* name) -> void* {
      const bool asked = std::strcmp(name, "ggml_backend_set_n_threads") == 0;
      return asked ? reinterpret_cast<void*>(set_threads) : nullptr;
    };
    return made;
  }();
  return &one;
}

bool runs_here(const char* needs) {
#if defined(__x86_64__)
  if (std::strcmp(needs, "avx512f") == 0) return __builtin_cpu_supports("avx512f") != 0;
  if (std::strcmp(needs, "avx2") == 0) return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#endif
  return *needs == '\0';
}

}  // namespace

std::string offer_attention() {
  static bool offered = false;
  if (offered) return {};
  const char* needs = attention_needs();
  if (needs == nullptr) return "there is no code for this kind of processor";
  if (!runs_here(needs)) return "it was built for a processor with " + std::string(needs);
  ggml_backend_register(reinterpret_cast<ggml_backend_reg_t>(registry()));
  offered = true;
  return {};
}

void share(std::vector<Beginning> all) { beginnings = std::move(all); }

}  // namespace tidemill
