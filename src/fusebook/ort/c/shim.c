/* ONNX Runtime on one side, Python on the other: operators whose kernels are Python functions.
 *
 * Python loads this library too, and describes its operators by fusebook_define before it asks ONNX Runtime to register
 * the library. Tensors are handed over as DLPack structs over ONNX Runtime's memory: nothing is copied.
 */
#include "ort_api.h"

#include <stdlib.h>
#include <string.h>

enum { MESSAGE = 2048 };

/* Of Python's stable ABI, so that no header of Python need be installed. */
typedef struct Object Object;
int PyGILState_Ensure(void);
void PyGILState_Release(int);
Object *PyCapsule_New(void *, const char *name, void (*)(Object *));
void *PyCapsule_GetPointer(Object *, const char *name);
int PyCapsule_IsValid(Object *, const char *name);
Object *PyTuple_New(ptrdiff_t);
int PyTuple_SetItem(Object *, ptrdiff_t, Object *);
Object *PyTuple_GetItem(Object *, ptrdiff_t);
ptrdiff_t PyTuple_Size(Object *);
long long PyLong_AsLongLong(Object *);
Object *Py_BuildValue(const char *, ...);
Object *PyObject_CallFunction(Object *, const char *, ...);
int PyObject_IsTrue(Object *);
void PyErr_WriteUnraisable(Object *);
void Py_DecRef(Object *);

/* DLPack 0.x, as every framework takes it. */
typedef struct {
  void *data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor tensor;
  void *context;
  void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

typedef struct {
  DLManagedTensor managed;
  int64_t sizes[MOST_AXES];
} Handed;

static void forget(DLManagedTensor *managed) { free(managed); }

/* Whoever takes the struct renames the capsule. */
static const char *const UNTAKEN = "dltensor";
static void drop(Object *capsule) {
  if (PyCapsule_IsValid(capsule, UNTAKEN)) free(PyCapsule_GetPointer(capsule, UNTAKEN));
}

/* A tensor as a capsule for from_dlpack; NULL for an element type that torch does not have. */
static Object *hand_over(const View *seen, int device) {
  Handed *handed = malloc(sizeof *handed); /* sizes follow it */
  if (!handed) return NULL;
  memset(&handed->managed, 0, sizeof handed->managed);
  memcpy(handed->sizes, seen->sizes, seen->axes * sizeof *seen->sizes);
  DLTensor *t = &handed->managed.tensor;
  t->data = seen->data;
  t->device.type = device < 0 ? 1 : 2; /* kDLCPU, kDLCUDA */
  t->device.id = device < 0 ? 0 : device;
  t->ndim = (int32_t)seen->axes;
  t->shape = handed->sizes;
  t->dtype.lanes = 1;
  switch (seen->type) {
    case FLOAT32: t->dtype.code = 2, t->dtype.bits = 32; break;
    case FLOAT64: t->dtype.code = 2, t->dtype.bits = 64; break;
    case FLOAT16: t->dtype.code = 2, t->dtype.bits = 16; break;
    case BFLOAT16: t->dtype.code = 4, t->dtype.bits = 16; break;
    case INT8: t->dtype.code = 0, t->dtype.bits = 8; break;
    case INT16: t->dtype.code = 0, t->dtype.bits = 16; break;
    case INT32: t->dtype.code = 0, t->dtype.bits = 32; break;
    case INT64: t->dtype.code = 0, t->dtype.bits = 64; break;
    case UINT8: t->dtype.code = 1, t->dtype.bits = 8; break;
    case BOOL: t->dtype.code = 6, t->dtype.bits = 8; break;
    default: free(handed); return NULL;
  }
  handed->managed.deleter = forget;
  return PyCapsule_New(&handed->managed, UNTAKEN, drop);
}

/* By ctypes. Sets `done`, or leaves a message; what a callback of ctypes that raises returns is not defined. */
typedef void (*Create)(size_t op, Api api, const void *info, size_t *kernel, char *message, int *done);
typedef void (*Destroy)(size_t kernel);

typedef struct {
  const Overload *op;
  Api api;
  size_t number;
} Kernel;

static Create create;
static Object *compute; /* called without ctypes, which takes longer; returns whether it is done, or leaves a message */
static Destroy destroy;

/* Operators that a session takes together. ONNX Runtime keeps pointers to its domain, so it lives as long as the process. */
typedef struct {
  const char *name;
  void *domain; /* made when it is registered first */
  size_t count;
  Overload *overloads[];
} Selection;

static Selection *selected;

/* Whether ONNX Runtime has what was asked for. */
static int there(Api api, Status status) {
  if (status) ReleaseStatus(api)(status);
  return !status;
}

static Status failed(Api api, const char *message, const char *name) {
  char whole[MESSAGE + 256];
  if (message[0]) return CreateStatus(api)(ORT_FAIL, message);
  snprintf(whole, sizeof whole, "fusebook: the Python function behind %s could not be called", name);
  return CreateStatus(api)(ORT_FAIL, whole);
}

static Status create_kernel(const CustomOp *op, Api api, const void *info, void **out) {
  char message[MESSAGE] = "";
  int done = 0;
  Kernel *kernel = malloc(sizeof *kernel);
  if (!kernel || !create) return free(kernel), CreateStatus(api)(ORT_FAIL, "fusebook: out of memory, or Python has ended");
  kernel->op = OVERLOAD(op);
  kernel->api = api;
  create(kernel->op->number, api, info, &kernel->number, message, &done);
  if (!done) {
    free(kernel);
    return failed(api, message, OVERLOAD(op)->name);
  }
  *out = kernel;
  return NULL;
}

static void destroy_kernel(void *pointer) {
  Kernel *kernel = pointer;
  if (destroy) destroy(kernel->number); /* Python may have ended before the session has */
  free(kernel);
}

/* What a running kernel needs to allocate its outputs; Python passes it back. */
typedef struct {
  const Kernel *kernel;
  void *context;
  int device;
  Status status; /* why the last output could not be had */
} Running;

static Status compute_kernel(void *pointer, void *context) {
  const Kernel *kernel = pointer;
  Api api = kernel->api;
  char message[MESSAGE] = "";
  void *stream = NULL, *device = NULL;
  Running running = {kernel, context, kernel->op->cuda ? 0 : -1, NULL};
  Status status = NULL;
  size_t given = 0;

  if (!compute) return CreateStatus(api)(ORT_FAIL, "fusebook: Python has ended, and its functions with it");
  if (kernel->op->cuda) {
    if ((status = KernelContext_GetGPUComputeStream(api)(context, &stream))) return status;
    /* All inputs may be on the host. Some versions say that there is no device where it is number 0. */
    if (there(api, KernelContext_GetResource(api)(context, CUDA_RESOURCES, CUDA_DEVICE, &device)))
      running.device = (int)(intptr_t)device;
  }
  if ((status = KernelContext_GetInputCount(api)(context, &given))) return status;
  int gil = PyGILState_Ensure(), done = 0;
  Object *inputs = PyTuple_New((ptrdiff_t)kernel->op->inputs);
  if (!inputs) status = CreateStatus(api)(ORT_FAIL, "fusebook: out of memory");
  for (size_t i = 0; i < kernel->op->inputs && !status; i++) {
    const void *value = NULL;
    View seen;
    int on_device = kernel->op->cuda && !kernel->op->on_host[i];
    if (i < given && (status = KernelContext_GetInput(api)(context, i, &value))) break;
    if (value && (status = view(api, value, &seen))) break;
    if (value && on_device && (status = device_of(api, value, &running.device))) break;
    Object *one = value ? hand_over(&seen, on_device ? running.device : -1) : Py_BuildValue("");
    if (one) PyTuple_SetItem(inputs, (ptrdiff_t)i, one);
    else status = CreateStatus(api)(ORT_FAIL, "fusebook: an input has an element type that no tensor of torch has");
  }
  if (status) {
    Py_DecRef(inputs);
  } else {
    Object *result = PyObject_CallFunction(compute, "nNKKiK", kernel->number, inputs, (uint64_t)&running,
                                           (uint64_t)stream, running.device, (uint64_t)message);
    if (!result) PyErr_WriteUnraisable(compute);
    else done = PyObject_IsTrue(result);
    Py_DecRef(result);
  }
  PyGILState_Release(gil);
  if (status) return status;
  if (running.status) {
    if (!done && !message[0]) return running.status;
    ReleaseStatus(api)(running.status);
  }
  return done ? NULL : failed(api, message, kernel->op->name);
}

/* For Python ---------------------------------------------------------------------------------------------------- */

EXPORT void fusebook_callbacks(Create c, Object *run, Destroy d) {
  create = c;
  compute = run;
  destroy = d;
}

/* An operator for one choice of types and one provider. It lives as long as the process: sessions point to it. */
EXPORT void *fusebook_define(size_t number, const char *name, int cuda, size_t inputs, const int *input_types,
                             const int *characteristics, const int *on_host, size_t outputs, const int *output_types) {
  if (inputs > MOST_VALUES || outputs > MOST_VALUES) return NULL;
  Overload *o = calloc(1, sizeof *o);
  if (!o || !(o->name = strdup(name))) return free(o), NULL;
  o->number = number;
  o->cuda = cuda;
  o->inputs = inputs;
  o->outputs = outputs;
  memcpy(o->input_types, input_types, inputs * sizeof *input_types);
  memcpy(o->characteristics, characteristics, inputs * sizeof *characteristics);
  memcpy(o->on_host, on_host, inputs * sizeof *on_host);
  memcpy(o->output_types, output_types, outputs * sizeof *output_types);
  answer(o, create_kernel, compute_kernel, destroy_kernel);
  return o;
}

EXPORT Selection *fusebook_together(const char *domain, Overload *const *overloads, size_t count) {
  Selection *s = calloc(1, sizeof *s + count * sizeof *overloads);
  if (!s || !(s->name = strdup(domain))) return free(s), NULL;
  s->count = count;
  memcpy(s->overloads, overloads, count * sizeof *overloads);
  return s;
}

/* What the next RegisterCustomOps registers; Python holds a lock until that has happened. */
EXPORT void fusebook_select(Selection *s) { selected = s; }

/* Let ONNX Runtime allocate an output of at most 16 axes. None where it cannot: the run then ends with its status. */
EXPORT Object *fusebook_output(Running *running, size_t i, Object *shape) {
  Api api = running->kernel->api;
  View seen = {.type = running->kernel->op->output_types[i], .axes = (size_t)PyTuple_Size(shape)};
  void *value = NULL;
  for (size_t axis = 0; axis < seen.axes; axis++)
    seen.sizes[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape, (ptrdiff_t)axis));
  running->status = countable(api, &seen);
  if (!running->status)
    running->status = KernelContext_GetOutput(api)(running->context, i, seen.sizes, seen.axes, &value);
  if (!running->status) running->status = GetTensorMutableData(api)(value, &seen.data);
  if (!running->status && running->kernel->op->cuda) running->status = device_of(api, value, &running->device);
  if (running->status) return Py_BuildValue("");
  return hand_over(&seen, running->kernel->op->cuda ? running->device : -1);
}

/* An attribute of a node, or 0 where it has none of that name and kind. */
EXPORT int fusebook_int(Api api, const void *info, const char *name, int64_t *out) {
  return there(api, KernelInfoGetAttribute_int64(api)(info, name, out));
}
EXPORT int fusebook_float(Api api, const void *info, const char *name, float *out) {
  return there(api, KernelInfoGetAttribute_float(api)(info, name, out));
}
EXPORT int fusebook_string(Api api, const void *info, const char *name, char *out, size_t *size) {
  return there(api, KernelInfoGetAttribute_string(api)(info, name, out, size));
}
EXPORT int fusebook_ints(Api api, const void *info, const char *name, int64_t *out, size_t *count) {
  return there(api, KernelInfoGetAttributeArray_int64(api)(info, name, out, count));
}
EXPORT int fusebook_floats(Api api, const void *info, const char *name, float *out, size_t *count) {
  return there(api, KernelInfoGetAttributeArray_float(api)(info, name, out, count));
}

/* For ONNX Runtime ---------------------------------------------------------------------------------------------- */

EXPORT Status RegisterCustomOps(void *options, const ApiBase *base) {
  Status why;
  Api api = api_of(base, &why);
  if (!api) return why;
  if (!selected || !create)
    return CreateStatus(api)(ORT_INVALID_ARGUMENT, "fusebook: this library is registered by fusebook.ort.register");
  if (!selected->domain) {
    void *domain = NULL;
    Status status = CreateCustomOpDomain(api)(selected->name, &domain);
    for (size_t i = 0; i < selected->count && !status; i++)
      status = CustomOpDomain_Add(api)(domain, &selected->overloads[i]->op);
    if (status) return status;
    selected->domain = domain;
  }
  return AddCustomOpDomain(api)(options, selected->domain);
}
