/* What Fusebook uses of ONNX Runtime's C API, so that no header of its need be installed, and how its libraries describe
 * their operators by it.
 *
 * OrtApi is a table of functions whose places never change: a function is reached by its number. OrtCustomOp only grows
 * at its end, and `version` says how much of it is there; 16 is the first whose kernels return a status, and every
 * ONNX Runtime from 1.16 on accepts it.
 */
#ifndef FUSEBOOK_ORT_API_H
#define FUSEBOOK_ORT_API_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))
#define FUSEBOOK_API_VERSION 16

typedef void *Status; /* NULL is success */
typedef const void *const *Api;

typedef struct {
  Api (*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} ApiBase;

typedef struct CustomOp {
  uint32_t version;
  void *(*CreateKernel)(const struct CustomOp *, Api, const void *info);
  const char *(*GetName)(const struct CustomOp *);
  const char *(*GetExecutionProviderType)(const struct CustomOp *);
  int (*GetInputType)(const struct CustomOp *, size_t);
  size_t (*GetInputTypeCount)(const struct CustomOp *);
  int (*GetOutputType)(const struct CustomOp *, size_t);
  size_t (*GetOutputTypeCount)(const struct CustomOp *);
  void (*KernelCompute)(void *kernel, void *context);
  void (*KernelDestroy)(void *kernel);
  int (*GetInputCharacteristic)(const struct CustomOp *, size_t);
  int (*GetOutputCharacteristic)(const struct CustomOp *, size_t);
  int (*GetInputMemoryType)(const struct CustomOp *, size_t);
  int (*GetVariadicInputMinArity)(const struct CustomOp *);
  int (*GetVariadicInputHomogeneity)(const struct CustomOp *);
  int (*GetVariadicOutputMinArity)(const struct CustomOp *);
  int (*GetVariadicOutputHomogeneity)(const struct CustomOp *);
  Status (*CreateKernelV2)(const struct CustomOp *, Api, const void *info, void **kernel);
  Status (*KernelComputeV2)(void *kernel, void *context);
} CustomOp;

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_NOT_IMPLEMENTED = 9 };
enum { REQUIRED = 0, OPTIONAL = 1 };
enum { CUDA_RESOURCES = 3, CUDA_DEVICE = 10004 };
enum { MEMORY_OF_PROVIDER = 0, MEMORY_OF_HOST = -2 };
enum { FLOAT32 = 1, UINT8 = 2, INT8 = 3, INT16 = 5, INT32 = 6, INT64 = 7, BOOL = 9, FLOAT16 = 10, FLOAT64 = 11,
       BFLOAT16 = 16 };

#define CreateStatus(api) ((Status(*)(int, const char *))(api)[0])
#define CreateCustomOpDomain(api) ((Status(*)(const char *, void **))(api)[26])
#define CustomOpDomain_Add(api) ((Status(*)(void *, const CustomOp *))(api)[27])
#define AddCustomOpDomain(api) ((Status(*)(void *options, void *))(api)[28])
#define GetTensorMutableData(api) ((Status(*)(void *, void **))(api)[51])
#define GetTensorElementType(api) ((Status(*)(const void *, int *))(api)[60])
#define GetDimensionsCount(api) ((Status(*)(const void *, size_t *))(api)[61])
#define GetDimensions(api) ((Status(*)(const void *, int64_t *, size_t))(api)[62])
#define GetTensorTypeAndShape(api) ((Status(*)(const void *, void **))(api)[65])
#define MemoryInfoGetId(api) ((Status(*)(const void *, int *))(api)[72])
#define KernelInfoGetAttribute_float(api) ((Status(*)(const void *, const char *, float *))(api)[85])
#define KernelInfoGetAttribute_int64(api) ((Status(*)(const void *, const char *, int64_t *))(api)[86])
#define KernelInfoGetAttribute_string(api) ((Status(*)(const void *, const char *, char *, size_t *))(api)[87])
#define KernelContext_GetInputCount(api) ((Status(*)(const void *, size_t *))(api)[88])
#define KernelContext_GetInput(api) ((Status(*)(const void *, size_t, const void **))(api)[90])
#define KernelContext_GetOutput(api) ((Status(*)(void *, size_t, const int64_t *, size_t, void **))(api)[91])
#define ReleaseStatus(api) ((void (*)(Status))(api)[93])
#define ReleaseTensorTypeAndShapeInfo(api) ((void (*)(void *))(api)[99])
#define KernelInfoGetAttributeArray_float(api) ((Status(*)(const void *, const char *, float *, size_t *))(api)[162])
#define KernelInfoGetAttributeArray_int64(api) ((Status(*)(const void *, const char *, int64_t *, size_t *))(api)[163])
#define KernelContext_GetGPUComputeStream(api) ((Status(*)(const void *, void **))(api)[193])
#define GetTensorMemoryInfo(api) ((Status(*)(const void *, const void **))(api)[194])
#define KernelContext_GetResource(api) ((Status(*)(const void *, int, int, void **))(api)[265])

/* The shape, type and address of a tensor. */
enum { MOST_AXES = 16 };
typedef struct {
  void *data;
  int type;
  size_t axes;
  int64_t sizes[MOST_AXES];
} View;

/* Refuse sizes by which a framework cannot count, though one of them is 0: torch frees twice what it was handed. */
static inline Status countable(Api api, const View *seen) {
  int64_t count = 1;
  for (size_t axis = 0; axis < seen->axes; axis++)
    if (seen->sizes[axis] > 0 && __builtin_mul_overflow(count, seen->sizes[axis], &count))
      return CreateStatus(api)(ORT_INVALID_ARGUMENT, "fusebook: expected sizes whose product is below 2**63; reshape it");
  return NULL;
}

static inline Status view(Api api, const void *value, View *out) {
  void *info = NULL;
  Status status = GetTensorTypeAndShape(api)(value, &info);
  if (status) return status;
  status = GetDimensionsCount(api)(info, &out->axes);
  if (!status && out->axes > MOST_AXES)
    status = CreateStatus(api)(ORT_INVALID_ARGUMENT, "fusebook: expected a tensor of at most 16 axes; reshape it");
  if (!status) status = GetTensorElementType(api)(info, &out->type);
  if (!status) status = GetDimensions(api)(info, out->sizes, out->axes);
  ReleaseTensorTypeAndShapeInfo(api)(info);
  if (!status) status = countable(api, out);
  if (!status) status = GetTensorMutableData(api)((void *)value, &out->data);
  return status;
}

static inline Status device_of(Api api, const void *value, int *device) {
  const void *memory = NULL;
  Status status = GetTensorMemoryInfo(api)(value, &memory);
  return status ? status : MemoryInfoGetId(api)(memory, device);
}

/* An operator for one choice of types and one provider, and what ONNX Runtime asks about it. */
enum { MOST_VALUES = 32 };
typedef struct {
  CustomOp op; /* first: a pointer to it is a pointer to the whole */
  size_t number;
  const char *name;
  int cuda;
  size_t inputs, outputs;
  int input_types[MOST_VALUES], output_types[MOST_VALUES];
  int characteristics[MOST_VALUES], on_host[MOST_VALUES];
} Overload;

#define OVERLOAD(op) ((const Overload *)(op))
static const char *get_name(const CustomOp *op) { return OVERLOAD(op)->name; }
static const char *get_provider(const CustomOp *op) {
  return OVERLOAD(op)->cuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
}
static int get_input_type(const CustomOp *op, size_t i) { return OVERLOAD(op)->input_types[i]; }
static size_t get_input_count(const CustomOp *op) { return OVERLOAD(op)->inputs; }
static int get_output_type(const CustomOp *op, size_t i) { return OVERLOAD(op)->output_types[i]; }
static size_t get_output_count(const CustomOp *op) { return OVERLOAD(op)->outputs; }
static int get_characteristic(const CustomOp *op, size_t i) { return OVERLOAD(op)->characteristics[i]; }
static int always_required(const CustomOp *op, size_t i) { return (void)op, (void)i, REQUIRED; }
static int get_memory(const CustomOp *op, size_t i) {
  return OVERLOAD(op)->on_host[i] ? MEMORY_OF_HOST : MEMORY_OF_PROVIDER;
}
static int one(const CustomOp *op) { return (void)op, 1; }

static inline void answer(Overload *o, Status (*create)(const CustomOp *, Api, const void *, void **),
                          Status (*compute)(void *, void *), void (*destroy)(void *)) {
  o->op = (CustomOp){
      .version = FUSEBOOK_API_VERSION, .GetName = get_name, .GetExecutionProviderType = get_provider,
      .GetInputType = get_input_type, .GetInputTypeCount = get_input_count, .GetOutputType = get_output_type,
      .GetOutputTypeCount = get_output_count, .KernelDestroy = destroy, .GetInputCharacteristic = get_characteristic,
      .GetOutputCharacteristic = always_required, .GetInputMemoryType = get_memory, .GetVariadicInputMinArity = one,
      .GetVariadicInputHomogeneity = one, .GetVariadicOutputMinArity = one, .GetVariadicOutputHomogeneity = one,
      .CreateKernelV2 = create, .KernelComputeV2 = compute};
}

/* The API of an ONNX Runtime; NULL, and why, where it is too old. */
static inline Api api_of(const ApiBase *base, Status *why) {
  char message[256];
  Api api = base->GetApi(FUSEBOOK_API_VERSION), old;
  if (api) return api;
  snprintf(message, sizeof message, "fusebook: needs ONNX Runtime 1.%d or later, got %s; install a later one",
           FUSEBOOK_API_VERSION, base->GetVersionString());
  old = base->GetApi(1);
  *why = old ? CreateStatus(old)(ORT_NOT_IMPLEMENTED, message) : NULL;
  return NULL;
}

#endif
