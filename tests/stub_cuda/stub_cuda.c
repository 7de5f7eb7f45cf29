// A libcuda.so.1 without hardware, for tests of the CUDA driver, contexts above all. Device memory is host memory; a
// launch is recorded, and run if `stub_cuda_run_with` was told how. Settings: stub_common/stub.h; STUB_DEVICES holds
// compute capabilities, "9.0,8.0".
//
// Build: cc -shared -fPIC -O1 -I tests/stub_common -o libcuda.so.1 tests/stub_cuda/stub_cuda.c -lpthread

#define DEFAULT_DEVICES "9.0"
#include "stub.h"

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
};

#define MAX_DEVICES 8

typedef struct {
  int device, retained;
} Context;

static Context primary[MAX_DEVICES];
static __thread Context *current;

// Leaves the function unless the thread has a context.
#define NEEDS_CONTEXT \
  if (!current) return end(INVALID_CONTEXT)

// Exported as in the library, recorded under the name of the header.
int cuEventDestroy(struct timespec *event) __asm__("cuEventDestroy_v2");
int cuMemAlloc(void **address, size_t size) __asm__("cuMemAlloc_v2");
int cuMemFree(void *address) __asm__("cuMemFree_v2");
int cuMemcpyHtoD(void *destination, const void *source, size_t size) __asm__("cuMemcpyHtoD_v2");
int cuMemcpyDtoH(void *destination, const void *source, size_t size) __asm__("cuMemcpyDtoH_v2");
int cuMemsetD8(void *destination, unsigned char value, size_t size) __asm__("cuMemsetD8_v2");

// Devices and contexts.

int cuInit(unsigned flags) {
  CALL("flags=%u", flags);
  return end(device_count() ? SUCCESS : NO_DEVICE);
}

int cuDriverGetVersion(int *version) {
  CALL("%s", "");
  *version = 13010;
  return end(SUCCESS);
}

int cuDeviceGetCount(int *count) {
  CALL("%s", "");
  *count = device_count();
  return end(SUCCESS);
}

int cuDeviceGet(int *device, int ordinal) {
  CALL("ordinal=%d", ordinal);
  *device = ordinal;
  return end(ordinal >= 0 && ordinal < device_count() ? SUCCESS : INVALID_DEVICE);
}

int cuDeviceGetName(char *name, int size, int device) {
  CALL("device=%d", device);
  snprintf(name, size, "stub device %d", device);
  return end(SUCCESS);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  CALL("attribute=%d device=%d", attribute, device);
  char arch[16];
  device_arch(device, arch, sizeof arch);
  switch (attribute) {
    case 1: *value = 1024; break;     // MAX_THREADS_PER_BLOCK
    case 10: *value = 32; break;      // WARP_SIZE
    case 16: *value = 132; break;     // MULTIPROCESSOR_COUNT
    case 75: *value = arch[0] - '0'; break;
    case 76: *value = arch[2] - '0'; break;
    case 97: *value = 232448; break;  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    default: return end(INVALID_VALUE);
  }
  return end(SUCCESS);
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
  CALL("device=%d", device);
  primary[device].device = device;
  primary[device].retained++;
  *context = &primary[device];
  return end(SUCCESS);
}

// How often a primary context was retained.
int stub_retained(void) {
  int retained = 0;
  for (int i = 0; i < MAX_DEVICES; i++) retained += primary[i].retained;
  return retained;
}

int cuCtxGetCurrent(Context **context) {
  CALL("%s", "");
  *context = current;
  return end(SUCCESS);
}

int cuCtxSetCurrent(Context *context) {
  CALL("device=%d", context ? context->device : -1);
  current = context;
  return end(SUCCESS);
}

int cuCtxSynchronize(void) {
  CALL("%s", "");
  NEEDS_CONTEXT;
  return end(SUCCESS);
}

// Modules.

int cuModuleLoadData(Module **module, const char *image) {
  CALL("device=%d", current ? current->device : -1);
  NEEDS_CONTEXT;
  *module = parse_image(image, current->device);
  return end(*module ? SUCCESS : INVALID_IMAGE);
}

int cuModuleUnload(Module *module) {
  CALL("device=%d", module->device);
  NEEDS_CONTEXT;
  free(module);
  count(&live_modules, -1);
  return end(SUCCESS);
}

int cuModuleGetFunction(Function **function, Module *module, const char *symbol) {
  CALL("symbol=%s", symbol);
  NEEDS_CONTEXT;
  *function = find_function(module, symbol);
  return end(*function ? SUCCESS : NOT_FOUND);
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
  CALL("symbol=%s attribute=%d value=%d", function->symbol, attribute, value);
  NEEDS_CONTEXT;
  if (attribute != 8 || value > 232448) return end(INVALID_VALUE);  // MAX_DYNAMIC_SHARED_SIZE_BYTES
  function->dynamic_shared_bytes = value;
  return end(SUCCESS);
}

// Whoever wants launches to compute something registers a function: it gets the symbol and the kernel's parameters.
static void (*run_launch)(const char *symbol, void **parameters);

void stub_cuda_run_with(void (*function)(const char *, void **)) { run_launch = function; }

int cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  char values[MAX_ARGUMENTS * 21];
  print_arguments(values, sizeof values, f, parameters);
  CALL("symbol=%s device=%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu extra=%d arguments=%s", f->symbol,
       current ? current->device : -1, gx, gy, gz, bx, by, bz, shared, (unsigned long long)(uintptr_t)stream,
       extra != NULL, values);
  NEEDS_CONTEXT;
  // What the driver refuses: a kernel of another context, and more shared memory than was allowed.
  if (f->module->device != current->device) return end(INVALID_HANDLE);
  if (shared > 49152 && (int)shared > f->dynamic_shared_bytes) return end(INVALID_VALUE);
  if (run_launch) run_launch(f->symbol, parameters);
  return end(SUCCESS);
}

typedef struct {
  int id, padding, value[16];
} Attribute;

typedef struct {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
} Config;

int cuLaunchKernelEx(const Config *c, Function *f, void **parameters, void **extra) {
  char values[MAX_ARGUMENTS * 21];
  print_arguments(values, sizeof values, f, parameters);
  CALL("symbol=%s device=%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu extra=%d attributes=%u first=%d:%d "
       "arguments=%s",
       f->symbol, current ? current->device : -1, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared,
       (unsigned long long)(uintptr_t)c->stream, extra != NULL, c->num_attributes, c->attributes->id,
       c->attributes->value[0], values);
  NEEDS_CONTEXT;
  if (f->module->device != current->device) return end(INVALID_HANDLE);
  if (c->shared > 49152 && (int)c->shared > f->dynamic_shared_bytes) return end(INVALID_VALUE);
  return end(SUCCESS);
}

// Streams and events.

int cuStreamIsCapturing(void *stream, int *status) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  NEEDS_CONTEXT;
  *status = is_captured((uintptr_t)stream);
  return end(SUCCESS);
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int of_thread;  // 0: global
  CALL("mode=%d", *mode);
  int former = of_thread;
  of_thread = *mode;
  *mode = former;
  return end(SUCCESS);
}

int cuStreamSynchronize(void *stream) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  NEEDS_CONTEXT;
  return end(SUCCESS);
}

int cuEventCreate(struct timespec **event, unsigned flags) {
  CALL("flags=%u", flags);
  NEEDS_CONTEXT;
  *event = calloc(1, sizeof **event);
  count(&live_events, 1);
  return end(SUCCESS);
}

int cuEventRecord(struct timespec *event, void *stream) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  clock_gettime(CLOCK_MONOTONIC, event);
  return end(SUCCESS);
}

int cuEventSynchronize(struct timespec *event) {
  CALL("%s", event ? "" : "null");
  return end(SUCCESS);
}

int cuEventElapsedTime(float *milliseconds, struct timespec *start, struct timespec *stop) {
  CALL("%s", "");
  *milliseconds = (stop->tv_sec - start->tv_sec) * 1e3f + (stop->tv_nsec - start->tv_nsec) * 1e-6f;
  return end(SUCCESS);
}

int cuEventDestroy(struct timespec *event) {
  CALL("%s", "");
  free(event);
  count(&live_events, -1);
  return end(SUCCESS);
}

// Memory.

int cuMemAlloc(void **address, size_t size) {
  CALL("device=%d size=%zu", current ? current->device : -1, size);
  NEEDS_CONTEXT;
  *address = take_memory(size, current->device);
  return end(*address ? SUCCESS : OUT_OF_MEMORY);
}

int cuMemFree(void *address) {
  CALL("address=%llu", (unsigned long long)(uintptr_t)address);
  NEEDS_CONTEXT;
  return end(give_memory_back(address) ? SUCCESS : INVALID_VALUE);
}

int cuMemcpyHtoD(void *destination, const void *source, size_t size) {
  CALL("size=%zu", size);
  NEEDS_CONTEXT;
  if (!is_device_memory(destination, size)) return end(INVALID_VALUE);
  memcpy(destination, source, size);
  return end(SUCCESS);
}

int cuMemcpyDtoH(void *destination, const void *source, size_t size) {
  CALL("size=%zu", size);
  NEEDS_CONTEXT;
  if (!is_device_memory(source, size)) return end(INVALID_VALUE);
  memcpy(destination, source, size);
  return end(SUCCESS);
}

int cuMemsetD8(void *destination, unsigned char value, size_t size) {
  CALL("value=%d size=%zu", value, size);
  NEEDS_CONTEXT;
  if (!is_device_memory(destination, size)) return end(INVALID_VALUE);
  memset(destination, value, size);
  return end(SUCCESS);
}

int cuPointerGetAttribute(int *value, int attribute, void *address) {
  CALL("attribute=%d", attribute);
  *value = device_of(address);
  return end(attribute == 9 && *value >= 0 ? SUCCESS : INVALID_VALUE);  // DEVICE_ORDINAL
}

// Errors.

// A code above 999 is newer than this library.
int cuGetErrorName(int code, const char **text) {
  *text = NULL;
  if (code > 999) return INVALID_VALUE;
  static __thread char name[64];
  snprintf(name, sizeof name, "NAME_OF_%d", code);
  *text = name;
  return SUCCESS;
}

int cuGetErrorString(int code, const char **text) {
  *text = NULL;
  if (code > 999) return INVALID_VALUE;
  static __thread char words[64];
  snprintf(words, sizeof words, "stub text of code %d", code);
  *text = words;
  return SUCCESS;
}
