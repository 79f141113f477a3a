/* Fusebook's kernels as a library that any ONNX Runtime loads: no Python, no torch, no Triton where it runs.
 *
 * `python -m fusebook.ort build` compiles the kernels and writes table.h: which kernel for which type, alignment and
 * size lies where in kernels.bin, and how it is launched. This file is the rest: the plan, in C, and the CUDA driver,
 * which is looked for when the first node runs, so that the library loads on a machine without a GPU too.
 */
#define _GNU_SOURCE
#include "ort_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* One compiled kernel. `limit` is the largest size that this variant takes at once; where none is large enough, the
 * last one goes on in tiles. */
typedef struct {
  int arch, kind, type, aligned;
  int limit, rows;
  size_t begin, size;
  int shared, threads, late, parameters;
  const char *name;
} Entry;

enum { KEYS, SCAN, FILL, ATOMIC, ROUND, SORT, SEGMENTS, SOFTMAX_ROWS, SOFTMAX_WIDE, SOFTMAX_AXIS,
       QUANTIZED /* and the 23 behind it: see quantized() */ };

#include "table.h" /* ENTRIES, ARCHITECTURES, TYPES, and the constants that plan and kernels must agree on */

extern const unsigned char fusebook_kernels[];
__asm__(".section .rodata\n.balign 16\nfusebook_kernels: .incbin \"" KERNELS "\"\n.previous\n");

enum { COUNT = sizeof ENTRIES / sizeof *ENTRIES, MOST_DEVICES = 64, MOST_PARAMETERS = 32 };

static Status refuse(Api api, int code, const char *format, ...) {
  char message[512];
  va_list more;
  va_start(more, format);
  vsnprintf(message, sizeof message, format, more);
  va_end(more);
  return CreateStatus(api)(code, message);
}

/* The CUDA driver ----------------------------------------------------------------------------------------------- */

typedef struct { int type, id; } Location;
typedef struct {
  int allocation, handles;
  Location location;
  void *security;
  size_t most;
  unsigned char reserved[56];
} PoolProperties;

typedef struct {
  int id, unused;
  union { int allowed; char reserved[64]; } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Configuration;

static struct {
  int (*cuInit)(unsigned);
  int (*cuCtxGetDevice)(int *);
  int (*cuDeviceGetAttribute)(int *, int, int);
  int (*cuModuleLoadData)(void **, const void *);
  int (*cuModuleGetFunction)(void **, void *, const char *);
  int (*cuFuncSetAttribute)(void *, int, int);
  int (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
  int (*cuLaunchKernelEx)(const Configuration *, void *, void **, void **); /* NULL in a driver before CUDA 11.8 */
  int (*cuMemPoolCreate)(void **, const PoolProperties *);
  int (*cuMemPoolSetAttribute)(void *, int, void *);
  int (*cuMemAllocFromPoolAsync)(uint64_t *, size_t, void *, void *);
  int (*cuMemFreeAsync)(uint64_t, void *);
  int (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void *);
  int (*cuGetErrorString)(int, const char **);
} driver;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int have_driver;

/* What is loaded on a device: its pool for scratch memory, and the kernels that have been launched. */
static struct {
  int arch;
  void *pool;
  void *functions[COUNT];
} devices[MOST_DEVICES];

static Status cuda(Api api, int code, const char *doing) {
  const char *why = NULL;
  if (!code) return NULL;
  driver.cuGetErrorString(code, &why);
  return refuse(api, ORT_FAIL, "fusebook: %s: CUDA error %d, %s", doing, code, why ? why : "unknown");
}

static Status find_driver(Api api) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return refuse(api, ORT_FAIL, "fusebook: found no CUDA driver (libcuda.so.1); install NVIDIA's driver");
#define FIND(name)                                                                                             \
  if (!(*(void **)&driver.name = dlsym(library, #name)))                                                       \
    return refuse(api, ORT_FAIL, "fusebook: this CUDA driver has no " #name "; install a driver of CUDA 11.4 or later");
  FIND(cuInit) FIND(cuCtxGetDevice) FIND(cuDeviceGetAttribute) FIND(cuModuleLoadData) FIND(cuModuleGetFunction)
  FIND(cuFuncSetAttribute) FIND(cuLaunchKernel) FIND(cuMemPoolCreate) FIND(cuMemPoolSetAttribute)
  FIND(cuMemAllocFromPoolAsync) FIND(cuMemFreeAsync) FIND(cuMemsetD8Async) FIND(cuGetErrorString)
#undef FIND
  *(void **)&driver.cuLaunchKernelEx = dlsym(library, "cuLaunchKernelEx");
  return cuda(api, driver.cuInit(0), "starting the CUDA driver");
}

static Status open_device(Api api, int device) {
  int major = 0, minor = 0, best = 0;
  driver.cuDeviceGetAttribute(&major, 75, device);
  driver.cuDeviceGetAttribute(&minor, 76, device);
  for (size_t i = 0; i < sizeof ARCHITECTURES / sizeof *ARCHITECTURES; i++) {
    int arch = ARCHITECTURES[i];
    /* Machine code runs on its own generation, from its own step on. */
    if (arch / 10 == major && arch % 10 <= minor && arch > best) best = arch;
  }
  if (!best)
    return refuse(api, ORT_FAIL,
                  "fusebook: this library holds machine code for the architectures " ARCHITECTURE_NAMES
                  ", and device %d is sm_%d%d; build it with --arch %d%d",
                  device, major, minor, major, minor);
  PoolProperties properties = {.allocation = 1, .location = {1, device}};
  Status status = cuda(api, driver.cuMemPoolCreate(&devices[device].pool, &properties), "making a pool of memory");
  uint64_t keep = UINT64_MAX; /* what has been freed stays for the next run */
  if (!status) status = cuda(api, driver.cuMemPoolSetAttribute(devices[device].pool, 4, &keep), "setting up a pool");
  Dl_info here; /* ONNX Runtime closes this library with its last session; the pool and modules would stay */
  if (!status && dladdr(devices, &here)) dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  if (!status) __atomic_store_n(&devices[device].arch, best, __ATOMIC_RELEASE); /* read without the lock */
  return status;
}

static Status load(Api api, int device, const Entry *e, void **function) {
  void *module = NULL;
  Status status = cuda(api, driver.cuModuleLoadData(&module, fusebook_kernels + e->begin), "loading a kernel");
  if (!status) status = cuda(api, driver.cuModuleGetFunction(function, module, e->name), e->name);
  if (!status && e->shared > 48 * 1024) status = cuda(api, driver.cuFuncSetAttribute(*function, 8, e->shared), e->name);
  if (!status) __atomic_store_n(&devices[device].functions[e - ENTRIES], *function, __ATOMIC_RELEASE);
  return status;
}

/* Running ------------------------------------------------------------------------------------------------------- */

typedef struct {
  Api api;
  int device;
  void *stream;
  uint64_t scratch; /* one block a run, handed out in pieces */
  unsigned across;  /* programs along the second axis; 0 is 1 */
} Run;

static Status begin(Run *run, Api api, void *context) {
  Status status = NULL;
  memset(run, 0, sizeof *run);
  run->api = api;
  if (!__atomic_load_n(&have_driver, __ATOMIC_ACQUIRE)) {
    pthread_mutex_lock(&lock);
    if (!have_driver && !(status = find_driver(api))) __atomic_store_n(&have_driver, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    if (status) return status;
  }
  if ((status = KernelContext_GetGPUComputeStream(api)(context, &run->stream))) return status;
  if ((status = cuda(api, driver.cuCtxGetDevice(&run->device), "asking for the device"))) return status;
  if (run->device >= MOST_DEVICES) return refuse(api, ORT_FAIL, "fusebook: expected at most 64 devices");
  if (!__atomic_load_n(&devices[run->device].arch, __ATOMIC_ACQUIRE)) {
    pthread_mutex_lock(&lock);
    if (!devices[run->device].arch) status = open_device(api, run->device);
    pthread_mutex_unlock(&lock);
  }
  return status;
}

/* The variant of a kernel for a size: the first whose limit is not below it, else the last. */
static const Entry *choose(const Run *run, int kind, int type, int aligned, int64_t size) {
  const Entry *found = NULL;
  for (const Entry *e = ENTRIES; e < ENTRIES + COUNT; e++) {
    if (e->kind != kind || e->type != type || e->aligned != aligned || e->arch != devices[run->device].arch) continue;
    found = e;
    if (e->limit >= size) break;
  }
  return found;
}

static Status launch(const Run *run, const Entry *e, int overlap, int64_t programs, void **given, int count) {
  void *function, *parameters[MOST_PARAMETERS], *nothing = NULL;
  if (!e) return refuse(run->api, ORT_NOT_IMPLEMENTED, "fusebook: this library was built without this type; build it with --dtype");
  if (programs > INT32_MAX) return refuse(run->api, ORT_NOT_IMPLEMENTED, "fusebook: the tensors are too large for one launch");
  if (programs < 1) return NULL;
  unsigned across = run->across ? run->across : 1;
  function = __atomic_load_n(&devices[run->device].functions[e - ENTRIES], __ATOMIC_ACQUIRE);
  if (!function) {
    Status status = NULL;
    pthread_mutex_lock(&lock);
    function = devices[run->device].functions[e - ENTRIES];
    if (!function) status = load(run->api, run->device, e, &function);
    pthread_mutex_unlock(&lock);
    if (status) return status;
  }
  for (int i = 0; i < e->parameters; i++) parameters[i] = i < count ? given[i] : &nothing; /* Triton's own, unused */
  if (overlap && e->late && driver.cuLaunchKernelEx) {
    /* It starts while the kernel ahead of it still runs, and waits in its own code for what it needs of that one. */
    Attribute early = {.id = 6, .value = {.allowed = 1}}; /* programmatic stream serialization */
    Configuration how = {{(unsigned)programs, across, 1}, {e->threads, 1, 1}, e->shared, run->stream, &early, 1};
    return cuda(run->api, driver.cuLaunchKernelEx(&how, function, parameters, NULL), e->name);
  }
  return cuda(run->api,
              driver.cuLaunchKernel(function, (unsigned)programs, across, 1, e->threads, 1, 1, e->shared, run->stream,
                                    parameters, NULL),
              e->name);
}
#define LAUNCH_WHEN(overlap, run, entry, programs, ...)                                                        \
  launch(run, entry, overlap, programs, (void *[]){__VA_ARGS__}, sizeof((void *[]){__VA_ARGS__}) / sizeof(void *))
#define LAUNCH(...) LAUNCH_WHEN(0, __VA_ARGS__)

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

static int type_of(int element) {
  switch (element) {
    case FLOAT32: return 0;
    case FLOAT16: return 1;
    case BFLOAT16: return 2;
    case FLOAT64: return 3;
    default: return -1;
  }
}
static const int SIZES[] = {4, 2, 2, 8};

/* Kernels and their attributes ------------------------------------------------------------------------------------ */

typedef struct {
  Api api;
  int64_t axis, masked;
  int64_t N, K, bits, group; /* of a weight of few bits */
} Kernel;

static Status softmax(Kernel *kernel, void *context) {
  Api api = kernel->api;
  const void *value = NULL;
  void *made = NULL;
  View x;
  Run run;
  uint64_t y;
  Status status = KernelContext_GetInput(api)(context, 0, &value);
  if (status || (status = view(api, value, &x))) return status;
  int64_t axes = x.axes ? (int64_t)x.axes : 1, axis = kernel->axis < 0 ? kernel->axis + axes : kernel->axis;
  if (axis < 0 || axis >= axes)
    return refuse(api, ORT_INVALID_ARGUMENT, "Softmax: expected axis from %lld to %lld, got %lld; give one that x has",
                  (long long)-axes, (long long)axes - 1, (long long)kernel->axis);
  status = KernelContext_GetOutput(api)(context, 0, x.sizes, x.axes, &made);
  if (status || (status = GetTensorMutableData(api)(made, (void **)&y))) return status;
  int64_t outer64 = 1, n64 = x.axes ? x.sizes[axis] : 1, inner64 = 1;
  for (int64_t i = 0; i < axis; i++) outer64 *= x.sizes[i];
  for (int64_t i = axis + 1; i < axes; i++) inner64 *= x.sizes[i];
  if (!outer64 || !n64 || !inner64) return NULL;
  if (inner64 == 1) inner64 = outer64, outer64 = 1; /* rows lie side by side */
  int last = inner64 * outer64 == 1 || axis == axes - 1 || outer64 == 1;
  for (int64_t i = axis + 1; i < axes; i++) last = last && x.sizes[i] == 1;
  if (n64 > INT32_MAX / 2 || inner64 > INT32_MAX || (!last && n64 * inner64 > INT32_MAX))
    return refuse(api, ORT_NOT_IMPLEMENTED, "Softmax: expected rows and axes of less than 2**31 elements, got more; split x");
  if ((status = begin(&run, api, context))) return status;
  int type = type_of(x.type), unit = 16 / SIZES[type];
  int aligned = last && n64 % unit == 0 && ((uintptr_t)x.data | y) % 16 == 0;
  int align = aligned ? unit : 1;
  int32_t n = n64 / align, inner = inner64, along, across, step;
  if (last) along = n, across = 0, step = 1;
  else along = 1, across = (int32_t)(n64 * inner64), step = inner;
  if (!last) {
    const Entry *e = choose(&run, SOFTMAX_AXIS, type, 0, n64);
    return LAUNCH(&run, e, outer64 * ceil_div(inner64, e ? e->rows : 1), &y, &x.data, &inner, &n, &across, &along,
                  &step, &across, &along, &step);
  }
  const Entry *e = choose(&run, SOFTMAX_ROWS, type, aligned, n64);
  if (e && e->limit < n64) e = choose(&run, SOFTMAX_WIDE, type, aligned, n64);
  return LAUNCH(&run, e, ceil_div(inner64, e ? e->rows : 1), &y, &x.data, &inner, &n, &across, &along, &step, &across,
                &along, &step);
}

static Status scatter(Kernel *kernel, void *context, const char *name) {
  Api api = kernel->api;
  const void *values[3];
  void *made = NULL;
  View shape, indices, updates;
  View *views[] = {&shape, &indices, &updates};
  uint64_t out;
  Run run;
  Status status = NULL;
  for (int i = 0; i < 3; i++) {
    if ((status = KernelContext_GetInput(api)(context, i, &values[i]))) return status;
    if ((status = view(api, values[i], views[i]))) return status;
  }
  if (shape.axes != 1 || shape.sizes[0] > MOST_AXES)
    return refuse(api, ORT_INVALID_ARGUMENT, "%s: expected shape to be a vector of at most 16 numbers; pass the sizes", name);
  const int64_t *size = shape.data;
  int64_t axes = shape.sizes[0], R = 1, D = 1, n = 1;
  for (int64_t i = 0; i < axes; i++)
    if (size[i] < 0)
      return refuse(api, ORT_INVALID_ARGUMENT, "%s: expected sizes from 0 up in shape, got %lld; give each axis its length",
                    name, (long long)size[i]);
  if (!indices.axes)
    return refuse(api, ORT_INVALID_ARGUMENT, "%s: expected indices of shape [..., k], got a number; add an axis", name);
  int64_t k = indices.sizes[indices.axes - 1];
  if (k > axes)
    return refuse(api, ORT_INVALID_ARGUMENT, "%s: expected indices of at most %lld components, got %lld; shape has no more axes",
                  name, (long long)axes, (long long)k);
  int fits = updates.axes == indices.axes - 1 + (size_t)(axes - k);
  for (size_t i = 0; fits && i < updates.axes; i++)
    fits = updates.sizes[i] == (i + 1 < indices.axes ? indices.sizes[i] : size[k + (int64_t)i - (int64_t)(indices.axes - 1)]);
  if (!fits)
    return refuse(api, ORT_INVALID_ARGUMENT,
                  "%s: expected updates of shape indices.shape[:-1] + shape[%lld:], got another; reshape or expand them",
                  name, (long long)k);
  for (int64_t i = 0; i < axes; i++) *(i < k ? &R : &D) *= size[i];
  for (size_t i = 0; i + 1 < indices.axes; i++) n *= indices.sizes[i];
  status = KernelContext_GetOutput(api)(context, 0, size, (size_t)axes, &made);
  if (status || (status = GetTensorMutableData(api)(made, (void **)&out))) return status;
  if (!R || !D) return NULL;
  if (R >= INT32_MAX || D >= INT32_MAX / 2 || n >= INT32_MAX)
    return refuse(api, ORT_NOT_IMPLEMENTED, "%s: expected less than 2**31 rows, columns and updates, got more; split them", name);
  if (k > 4)
    return refuse(api, ORT_NOT_IMPLEMENTED, "%s: expected indices of at most 4 components, got %lld; fold axes of shape",
                  name, (long long)k);
  if ((status = begin(&run, api, context))) return status;

  int type = type_of(updates.type), bytes = SIZES[type], half = bytes == 2, unit = 16 / bytes;
  uintptr_t read = (uintptr_t)updates.data | (k == 1 ? (uintptr_t)indices.data : 0); /* other indices become keys */
  int aligned = D % unit == 0 && (read | out) % 16 == 0;
  int64_t elements = R * D, masked = kernel->masked;
  int32_t rows = R, count = n, columns = D / (aligned ? unit : 1);
  uint64_t from = (uintptr_t)indices.data, source = (uintptr_t)updates.data;
  if (n == 0) return cuda(api, driver.cuMemsetD8Async(out, 0, elements * bytes, run.stream), "writing zeros");

  /* The plan: as in fusebook.kernels.scatter, without what needs a general sort. */
  int cached = elements * bytes <= 1 << 24;
  int scan = n <= SCAN_MOST && R <= SCAN_MOST;
  int sorted = !scan && n <= SORT_MOST && (cached ? half : n <= R / 4);
  int wide = (R + 2) * n >= (int64_t)1 << 31;
  int64_t pieces = 2 * (n / CHUNK + 1);
  const Entry *segments = choose(&run, SEGMENTS, type, aligned, D);
  int64_t tiles = segments ? ceil_div(D, segments->limit) : 1;

  int64_t keys_at = 0, at = k == 1 ? 0 : padded(8 * n);
  int64_t sums_at = at, order_at = 0, row_at = 0, start_at = 0, end_at = 0, count_at = 0, parts_at = 0;
  if (sorted) {
    order_at = at, row_at = order_at + padded(4 * n), start_at = row_at + padded(4 * n);
    end_at = start_at + padded(4 * R), count_at = end_at + padded(4 * R);
    parts_at = count_at + padded(4 * pieces * tiles), at = parts_at + padded(pieces * D * (bytes == 8 ? 8 : 4));
  } else if (!scan && half) {
    at = sums_at + padded(4 * elements);
  }
  if (at && (status = cuda(api, driver.cuMemAllocFromPoolAsync(&run.scratch, at, devices[run.device].pool, run.stream),
                           "allocating scratch memory")))
    return status;

  if (k != 1) {
    uint64_t keys = run.scratch + keys_at;
    int32_t S[4];
    for (int64_t i = 0; i < k; i++) S[i] = (int32_t)size[i];
    if (k == 0) status = cuda(api, driver.cuMemsetD8Async(keys, 0, 8 * n, run.stream), "writing zeros");
    else status = launch(&run, choose(&run, KEYS, 0, 0, k), 0, ceil_div(n, KEYS_BLOCK),
                         (void *[]){&keys, &from, &count, &masked, &S[0], &S[1], &S[2], &S[3]}, 4 + (int)k);
    from = keys, masked = -1;
  }
  if (status) {
  } else if (scan) {
    const Entry *e = choose(&run, SCAN, type, aligned, n);
    status = LAUNCH(&run, e, R * ceil_div(D, e ? e->rows : 1), &out, &from, &source, &rows, &columns, &count, &columns,
                    &masked);
  } else if (sorted) {
    uint64_t order = run.scratch + order_at, row = run.scratch + row_at, start = run.scratch + start_at;
    uint64_t end = run.scratch + end_at, counters = run.scratch + count_at, parts = run.scratch + parts_at;
    int32_t counted = pieces * tiles;
    const Entry *e = choose(&run, SORT, type, 0, wide);
    status = LAUNCH(&run, e, ceil_div(n, SORT_MINE) + ceil_div(elements, e ? e->rows : 1), &out, &order, &row, &start,
                    &end, &counters, &from, &elements, &rows, &count, &counted, &masked);
    if (!status)
      status = LAUNCH_WHEN(1, &run, segments, ceil_div(n, segments->rows) * tiles, &out, &source, &parts, &counters,
                           &order, &row, &start, &end, &columns, &count, &columns);
  } else {
    uint64_t sums = half ? run.scratch + sums_at : out;
    int small = R * D * (half ? 4 : bytes) <= 1 << 24;
    const Entry *fill = choose(&run, FILL, half ? 0 : type, 0, small);
    const Entry *e = choose(&run, ATOMIC, type, aligned, small && D > 128 ? 129 : D);
    status = LAUNCH(&run, fill, ceil_div(elements, fill ? fill->rows : 1), &sums, &elements);
    if (!status)
      status = LAUNCH_WHEN(small, &run, e, ceil_div(n, e ? e->rows : 1) * ceil_div(D, e ? e->limit : 1), &sums, &from,
                           &source, &rows, &columns, &count, &columns, &masked);
    if (!status && half) {
      const Entry *round = choose(&run, ROUND, type, 0, 0);
      status = LAUNCH(&run, round, ceil_div(elements, round ? round->rows : 1), &out, &sums, &elements);
    }
  }
  if (run.scratch) { /* in the order of the stream: after the last kernel has read it */
    Status freed = cuda(api, driver.cuMemFreeAsync(run.scratch, run.stream), "freeing scratch memory");
    if (freed && status) ReleaseStatus(api)(freed);
    else if (freed) status = freed;
  }
  return status;
}

/* A matmul with a weight as fusebook.PackedWeight has it: x, words, scales, zero points or nothing, bias. */
static Status quantized(Kernel *kernel, void *context) {
  Api api = kernel->api;
  const void *values[5];
  void *made = NULL;
  View views[5], *x = views;
  uint64_t y;
  Run run;
  Status status = NULL;
  int64_t N = kernel->N, K = kernel->K, tiles = ceil_div(N, 16), blocks = ceil_div(K, 512 / kernel->bits), M = 1;
  int64_t groups = ceil_div(K, kernel->group), sizes[MOST_AXES];
  for (int i = 0; i < 5; i++) {
    if ((status = KernelContext_GetInput(api)(context, i, &values[i]))) return status;
    if (values[i] && (status = view(api, values[i], &views[i]))) return status;
    if (!values[i] && i != 3)
      return refuse(api, ORT_INVALID_ARGUMENT, "QuantizedMatMul: expected a bias, got none; fusebook.ort.fuse gives one");
  }
  if (!x->axes || x->sizes[x->axes - 1] != K)
    return refuse(api, ORT_INVALID_ARGUMENT, "QuantizedMatMul: expected x of %lld columns, got another; give it that shape",
                  (long long)K);
  const int64_t words[] = {tiles, blocks, 2, 128}, scales[] = {tiles, groups, 8, 2};
  int fits = views[4].axes == 1 && views[4].sizes[0] == N;
  for (int i = 1; i < 4; i++)
    for (int a = 0; a < 4 && values[i]; a++)
      fits = fits && views[i].axes == 4 && views[i].sizes[a] == (i == 1 ? words : scales)[a];
  if (!fits)
    return refuse(api, ORT_INVALID_ARGUMENT, "QuantizedMatMul: expected a weight of %lld rows and %lld columns in the order "
                  "of Fusebook's kernel, got other sizes; make the node by fusebook.ort.fuse", (long long)N, (long long)K);
  for (size_t i = 0; i + 1 < x->axes; i++) M *= sizes[i] = x->sizes[i];
  sizes[x->axes - 1] = N;
  status = KernelContext_GetOutput(api)(context, 0, sizes, x->axes, &made);
  if (status || (status = GetTensorMutableData(api)(made, (void **)&y))) return status;
  if (!M || !N) return NULL;
  if (M * (N > K ? N : K) > INT32_MAX)
    return refuse(api, ORT_NOT_IMPLEMENTED, "QuantizedMatMul: expected less than 2**31 elements of x and of y, got more; split x");
  uintptr_t at = y;
  for (int i = 0; i < 5; i++) at |= values[i] ? (uintptr_t)views[i].data : 0;
  if (at % 16)
    return refuse(api, ORT_NOT_IMPLEMENTED, "QuantizedMatMul: expected tensors at multiples of 16 bytes, got others; copy them");
  if ((status = begin(&run, api, context))) return status;
  int which = QUANTIZED + ((kernel->bits == 8) * 3 + (kernel->group == 64) + 2 * (kernel->group == 128)) * 2 + !!values[3];
  if (tiles < MANY_TILES || blocks >= MANY_BLOCKS) which += 12; /* eight slices */
  const Entry *e = choose(&run, which, type_of(x->type), 1, M);
  int32_t m = M, n = N, k = K, b = blocks, g = groups;
  if (e) run.across = (unsigned)ceil_div(M, e->limit);
  int64_t programs = ceil_div(tiles, e ? e->rows : 1);
  void **w = &views[1].data, **s = &views[2].data, **z = &views[3].data, **bias = &views[4].data;
  if (values[3]) return LAUNCH(&run, e, programs, &y, &x->data, w, s, z, bias, &m, &n, &k, &b, &g);
  return LAUNCH(&run, e, programs, &y, &x->data, w, s, bias, &m, &n, &k, &b, &g);
}

static Status compute_quantized(void *kernel, void *context) { return quantized(kernel, context); }
static Status compute_softmax(void *kernel, void *context) { return softmax(kernel, context); }
static Status compute_scatter(void *kernel, void *context) { return scatter(kernel, context, "ScatterNDOfShape"); }
static Status compute_masked(void *kernel, void *context) { return scatter(kernel, context, "MaskedScatterNDOfShape"); }

/* Operators ----------------------------------------------------------------------------------------------------- */

enum { OP_SOFTMAX, OP_SCATTER, OP_MASKED, OP_QUANTIZED, OPS };
static const char *const NAMES[] = {"Softmax", "ScatterNDOfShape", "MaskedScatterNDOfShape", "QuantizedMatMul"};
static const int ELEMENTS[] = {FLOAT32, FLOAT16, BFLOAT16, FLOAT64};

/* Whether an attribute is there. An array is read from one of any kind; it then has no elements. */
static int present(Api api, const void *info, const char *name) {
  size_t count = 0;
  Status absent = KernelInfoGetAttributeArray_int64(api)(info, name, NULL, &count);
  if (absent) ReleaseStatus(api)(absent);
  return !absent;
}

/* An attribute that a node may leave out. One that is there with another type is refused, not taken for absent. */
static Status integer(Api api, const void *info, const char *op, const char *name, int64_t *out) {
  Status status = KernelInfoGetAttribute_int64(api)(info, name, out);
  if (!status) return NULL;
  ReleaseStatus(api)(status);
  if (!present(api, info, name)) return NULL;
  return refuse(api, ORT_INVALID_ARGUMENT, "%s: expected the attribute %s to be an int; set it as int", op, name);
}

static Status create_kernel(const CustomOp *op, Api api, const void *info, void **out) {
  int which = (int)OVERLOAD(op)->number;
  Kernel made = {.api = api, .axis = -1, .masked = which == OP_MASKED ? -1 : INT64_MIN};
  Status status = NULL;
  if (which == OP_SOFTMAX) status = integer(api, info, NAMES[which], "axis", &made.axis);
  if (which == OP_MASKED) status = integer(api, info, NAMES[which], "maskedValue", &made.masked);
  if (which == OP_QUANTIZED) {
    int64_t *fields[] = {&made.N, &made.K, &made.bits, &made.group};
    const char *const names[] = {"N", "K", "bits", "group"};
    for (int i = 0; i < 4 && !status; i++) status = integer(api, info, NAMES[which], names[i], fields[i]);
    int known = (made.bits == 4 || made.bits == 8) && (made.group == 32 || made.group == 64 || made.group == 128);
    if (!status && !(known && made.N >= 0 && made.K > 0 && made.K % 16 == 0 && made.N < INT32_MAX && made.K < INT32_MAX))
      status = refuse(api, ORT_NOT_IMPLEMENTED, "QuantizedMatMul: expected bits of 4 or 8, a group of 32, 64 or 128, and K "
                      "a multiple of 16, got another format; make the node by fusebook.ort.fuse");
  }
  if (!status && (which == OP_SCATTER || which == OP_MASKED)) {
    char reduction[32] = "add";
    size_t length = sizeof reduction;
    Status absent = KernelInfoGetAttribute_string(api)(info, "reduction", reduction, &length);
    if (absent) ReleaseStatus(api)(absent);
    if (absent ? present(api, info, "reduction") : strcmp(reduction, "add"))
      status = refuse(api, ORT_NOT_IMPLEMENTED, "%s: expected reduction to be add, which is all that is implemented",
                      NAMES[which]);
  }
  if (!status && !OVERLOAD(op)->cuda)
    status = refuse(api, ORT_NOT_IMPLEMENTED,
                    "%s: this library is compiled for GPUs, and the session has none; make it with CUDAExecutionProvider",
                    NAMES[which]);
  if (status) return status;
  Kernel *kernel = malloc(sizeof *kernel);
  if (!kernel) return refuse(api, ORT_FAIL, "fusebook: out of memory");
  *kernel = made;
  *out = kernel;
  return NULL;
}

static void destroy_kernel(void *kernel) { free(kernel); }

static Overload overloads[OPS * TYPES * 2];
static void *domain;

static Status define(Api api) {
  static Status (*const compute[])(void *, void *) = {compute_softmax, compute_scatter, compute_masked,
                                                     compute_quantized};
  void *made = NULL;
  Overload *o = overloads;
  Status status = CreateCustomOpDomain(api)("fusebook", &made);
  for (int which = 0; which < OPS; which++)
    for (int type = 0; type < 4; type++)
      for (int on_gpu = 0; on_gpu < 2 && BUILT[type]; on_gpu++, o++) {
        *o = (Overload){.number = which, .name = NAMES[which], .cuda = on_gpu, .inputs = 1, .outputs = 1,
                        .input_types = {ELEMENTS[type]}, .output_types = {ELEMENTS[type]}};
        if (which == OP_QUANTIZED) { /* x, words, scales, zero points and bias */
          if (ELEMENTS[type] != FLOAT16 && ELEMENTS[type] != BFLOAT16) break;
          o->inputs = 5;
          o->input_types[1] = INT32;
          o->input_types[2] = o->input_types[4] = ELEMENTS[type];
          o->input_types[3] = INT8;
          o->characteristics[3] = o->characteristics[4] = OPTIONAL;
        } else if (which != OP_SOFTMAX) { /* shape, indices and updates */
          o->inputs = 3;
          o->input_types[0] = o->input_types[1] = INT64;
          o->input_types[2] = ELEMENTS[type];
          o->on_host[0] = 1;
        }
        answer(o, create_kernel, compute[which], destroy_kernel);
        if (!status) status = CustomOpDomain_Add(api)(made, &o->op);
      }
  if (!status) domain = made;
  return status;
}

EXPORT Status RegisterCustomOps(void *options, const ApiBase *base) {
  Status status = NULL;
  Api api = api_of(base, &status);
  if (!api) return status;
  pthread_mutex_lock(&lock);
  if (!domain) status = define(api);
  pthread_mutex_unlock(&lock);
  return status ? status : AddCustomOpDomain(api)(options, domain);
}
