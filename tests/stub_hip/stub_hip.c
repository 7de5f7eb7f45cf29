// A libamdhip64.so without hardware, for tests of the HIP driver: enough of the HIP runtime to load modules, copy
// memory and take launches. Device memory is host memory; a launch is recorded, not run.
//
// Build: cc -shared -fPIC -O1 -o libamdhip64.so stub_hip.c
//
// A code object is text: "STUBHIP\n", then a line per kernel: its symbol and the sizes of its arguments in bytes,
// "w4a16_gemm 8 8 4 8\n". It ends with a NUL.
//
// Environment, read at every call, so that a test may change it as it goes:
//   STUB_HIP_DEVICES    archs of the devices, "gfx1151,gfx1201:xnack-" (default "gfx1151"; "" for none)
//   STUB_HIP_LOG        file to which each call is appended as a line: name, then name=value pairs
//   STUB_HIP_FAIL       "hipMalloc=2": this call fails with this code; "hipMalloc@3=2": its third one from here on
//   STUB_HIP_CAPTURING  a stream handle in decimal: that stream is being captured

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE_POINTER = 17,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
};

#define MAX_DEVICES 8
#define MAX_ARGUMENTS 64
#define MAX_KERNELS 64
#define MAX_ALLOCATIONS 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device = 0;
static __thread int last_error = SUCCESS;

// Calls, their record and their failures.

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

static void record(const char *call, const char *format, ...) {
  const char *path = setting("STUB_HIP_LOG", "");
  if (!*path) return;
  pthread_mutex_lock(&lock);
  FILE *file = fopen(path, "a");
  if (file) {
    va_list details;
    va_start(details, format);
    fprintf(file, "%s ", call);
    vfprintf(file, format, details);
    fputc('\n', file);
    va_end(details);
    fclose(file);
  }
  pthread_mutex_unlock(&lock);
}

// The code with which `call` is to fail now, or 0.
static int wanted_failure(const char *call) {
  static char known[256];  // the setting that `seen` counts for
  static int seen;
  const char *text = setting("STUB_HIP_FAIL", "");
  size_t length = strlen(call);
  int code = 0;
  pthread_mutex_lock(&lock);
  if (strcmp(known, text)) {
    snprintf(known, sizeof known, "%s", text);
    seen = 0;
  }
  if (!strncmp(text, call, length)) {
    long nth = 1;
    const char *rest = text + length;
    if (*rest == '@') nth = strtol(rest + 1, (char **)&rest, 10);
    if (*rest == '=' && ++seen >= nth) code = atoi(rest + 1);
  }
  pthread_mutex_unlock(&lock);
  return code;
}

static int end(int code) {
  if (code) last_error = code;
  return code;
}

// Records a call and leaves the function if the call is to fail.
#define CALL(...)                                \
  do {                                           \
    record(__func__, __VA_ARGS__);               \
    int wanted_ = wanted_failure(__func__);      \
    if (wanted_) return end(wanted_);            \
  } while (0)

// Devices.

static int device_count(void) {
  const char *text = setting("STUB_HIP_DEVICES", "gfx1151");
  int count = *text != 0;
  for (; *text; text++) count += *text == ',';
  return count;
}

static void device_arch(int device, char *arch, size_t size) {
  const char *text = setting("STUB_HIP_DEVICES", "gfx1151");
  while (device--) text = strchr(text, ',') + 1;
  snprintf(arch, size, "%.*s", (int)strcspn(text, ","), text);
}

int hipInit(unsigned flags) {
  CALL("flags=%u", flags);
  return end(device_count() ? SUCCESS : NO_DEVICE);
}

int hipGetDeviceCount(int *count) {
  CALL("%s", "");
  *count = device_count();
  return end(*count ? SUCCESS : NO_DEVICE);
}

int hipGetDevice(int *device) {
  CALL("%s", "");
  *device = current_device;
  return end(SUCCESS);
}

int hipSetDevice(int device) {
  CALL("device=%d", device);
  if (device < 0 || device >= device_count()) return end(INVALID_DEVICE);
  current_device = device;
  return end(SUCCESS);
}

int hipDeviceGetAttribute(int *value, int attribute, int device) {
  CALL("attribute=%d device=%d", attribute, device);
  if (device < 0 || device >= device_count()) return end(INVALID_DEVICE);
  switch (attribute) {
    case 56: *value = 1024; break;   // MaxThreadsPerBlock
    case 63: *value = 20; break;     // MultiprocessorCount
    case 74: *value = 65536; break;  // MaxSharedMemoryPerBlock
    case 87: *value = 32; break;     // WarpSize
    default: return end(INVALID_VALUE);
  }
  return end(SUCCESS);
}

// hipDeviceProp_tR0600 of ROCm 6 and later, as far as its last member read here.
typedef struct {
  char name[256];
  char between[1160 - 256];
  char gcnArchName[256];
} Properties;

_Static_assert(offsetof(Properties, gcnArchName) == 1160, "the offset in ROCm's header");

int hipGetDevicePropertiesR0600(Properties *properties, int device) {
  CALL("device=%d", device);
  if (device < 0 || device >= device_count()) return end(INVALID_DEVICE);
  snprintf(properties->name, sizeof properties->name, "stub device %d", device);
  device_arch(device, properties->gcnArchName, sizeof properties->gcnArchName);
  return end(SUCCESS);
}

// Modules.

struct Module;

typedef struct {
  struct Module *module;
  char symbol[128];
  int sizes[MAX_ARGUMENTS];
  int arguments;
} Function;

typedef struct Module {
  int device;
  int kernels;
  Function functions[MAX_KERNELS];
} Module;

int hipModuleLoadData(Module **module, const char *image) {
  CALL("device=%d", current_device);
  if (strncmp(image, "STUBHIP\n", 8)) return end(INVALID_IMAGE);
  Module *made = calloc(1, sizeof *made);
  made->device = current_device;
  char *text = strdup(image + 8), *lines = NULL;
  for (char *line = strtok_r(text, "\n", &lines); line; line = strtok_r(NULL, "\n", &lines)) {
    if (made->kernels == MAX_KERNELS) break;
    Function *function = &made->functions[made->kernels++];
    char *words = NULL, *word = strtok_r(line, " ", &words);
    function->module = made;
    snprintf(function->symbol, sizeof function->symbol, "%s", word);
    while ((word = strtok_r(NULL, " ", &words)) && function->arguments < MAX_ARGUMENTS)
      function->sizes[function->arguments++] = atoi(word);
  }
  free(text);
  *module = made;
  return end(SUCCESS);
}

int hipModuleUnload(Module *module) {
  CALL("device=%d", module->device);
  free(module);
  return end(SUCCESS);
}

int hipModuleGetFunction(Function **function, Module *module, const char *symbol) {
  CALL("symbol=%s device=%d", symbol, current_device);
  for (int i = 0; i < module->kernels; i++)
    if (!strcmp(module->functions[i].symbol, symbol)) {
      *function = &module->functions[i];
      return end(SUCCESS);
    }
  return end(NOT_FOUND);
}

int hipModuleLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  char values[MAX_ARGUMENTS * 20] = "";
  for (int i = 0, at = 0; parameters && i < f->arguments; i++) {
    uint64_t value = 0;
    memcpy(&value, parameters[i], f->sizes[i]);
    at += snprintf(values + at, sizeof values - at, "%s%llu", i ? "," : "", (unsigned long long)value);
  }
  CALL("symbol=%s device=%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu extra=%d arguments=%s", f->symbol,
       current_device, gx, gy, gz, bx, by, bz, shared, (unsigned long long)(uintptr_t)stream, extra != NULL, values);
  // What the runtime refuses: a kernel of another device, and more LDS than there is.
  if (f->module->device != current_device) return end(INVALID_HANDLE);
  if (shared > 65536) return end(INVALID_VALUE);
  return end(SUCCESS);
}

// Streams and events.

int hipStreamIsCapturing(void *stream, int *status) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  *status = (uintptr_t)stream && (uintptr_t)stream == strtoull(setting("STUB_HIP_CAPTURING", "0"), NULL, 10);
  return end(SUCCESS);
}

int hipStreamSynchronize(void *stream) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  return end(SUCCESS);
}

int hipDeviceSynchronize(void) {
  CALL("device=%d", current_device);
  return end(SUCCESS);
}

int hipEventCreate(struct timespec **event) {
  CALL("%s", "");
  *event = calloc(1, sizeof **event);
  return end(SUCCESS);
}

int hipEventRecord(struct timespec *event, void *stream) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  clock_gettime(CLOCK_MONOTONIC, event);
  return end(SUCCESS);
}

int hipEventSynchronize(struct timespec *event) {
  CALL("%s", event ? "" : "null");
  return end(SUCCESS);
}

int hipEventElapsedTime(float *milliseconds, struct timespec *start, struct timespec *stop) {
  CALL("%s", "");
  *milliseconds = (stop->tv_sec - start->tv_sec) * 1e3f + (stop->tv_nsec - start->tv_nsec) * 1e-6f;
  return end(SUCCESS);
}

int hipEventDestroy(struct timespec *event) {
  CALL("%s", "");
  free(event);
  return end(SUCCESS);
}

// Memory: host memory, with a table of what is allocated where.

static struct {
  char *start;
  size_t size;
  int device;
} allocations[MAX_ALLOCATIONS];

static int allocation_of(const void *address) {
  for (int i = 0; i < MAX_ALLOCATIONS; i++)
    if (allocations[i].start && (char *)address >= allocations[i].start &&
        (char *)address < allocations[i].start + allocations[i].size)
      return i;
  return -1;
}

// Whether `size` bytes at `address` are device memory.
static int is_device_memory(const void *address, size_t size) {
  pthread_mutex_lock(&lock);
  int i = allocation_of(address);
  int inside = i >= 0 && (char *)address + size <= allocations[i].start + allocations[i].size;
  pthread_mutex_unlock(&lock);
  return inside;
}

int hipMalloc(void **address, size_t size) {
  CALL("device=%d size=%zu", current_device, size);
  if (posix_memalign(address, 256, size ? size : 1)) return end(OUT_OF_MEMORY);
  memset(*address, 0xA5, size);
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < MAX_ALLOCATIONS && allocations[i].start) i++;
  if (i < MAX_ALLOCATIONS) {
    allocations[i].start = *address;
    allocations[i].size = size;
    allocations[i].device = current_device;
  }
  pthread_mutex_unlock(&lock);
  return end(i < MAX_ALLOCATIONS ? SUCCESS : OUT_OF_MEMORY);
}

int hipFree(void *address) {
  CALL("address=%llu", (unsigned long long)(uintptr_t)address);
  pthread_mutex_lock(&lock);
  int i = allocation_of(address);
  int known = i >= 0 && allocations[i].start == address;
  if (known) allocations[i].start = NULL;
  pthread_mutex_unlock(&lock);
  if (!known) return end(INVALID_DEVICE_POINTER);
  free(address);
  return end(SUCCESS);
}

int hipMemcpy(void *destination, const void *source, size_t size, int kind) {
  CALL("size=%zu kind=%d", size, kind);
  const void *on_device = kind == 1 ? destination : source;  // 1: host to device, 2: device to host
  if ((kind != 1 && kind != 2) || !is_device_memory(on_device, size)) return end(INVALID_VALUE);
  memcpy(destination, source, size);
  return end(SUCCESS);
}

int hipMemset(void *destination, int value, size_t size) {
  CALL("value=%d size=%zu", value, size);
  if (!is_device_memory(destination, size)) return end(INVALID_VALUE);
  memset(destination, value, size);
  return end(SUCCESS);
}

// hipPointerAttribute_t.
typedef struct {
  int type, device;
  void *device_pointer, *host_pointer;
  int is_managed;
  unsigned flags;
} PointerAttributes;

int hipPointerGetAttributes(PointerAttributes *attributes, const void *address) {
  CALL("address=%llu", (unsigned long long)(uintptr_t)address);
  pthread_mutex_lock(&lock);
  int i = allocation_of(address);
  if (i >= 0) attributes->device = allocations[i].device;
  pthread_mutex_unlock(&lock);
  return end(i >= 0 ? SUCCESS : INVALID_VALUE);
}

// Errors.

const char *hipGetErrorString(int code) {
  static __thread char text[64];
  snprintf(text, sizeof text, "stub text of code %d", code);
  return text;
}

const char *hipGetErrorName(int code) {
  static __thread char text[64];
  snprintf(text, sizeof text, "stub name of code %d", code);
  return text;
}

int hipGetLastError(void) {
  int code = last_error;
  last_error = SUCCESS;
  return code;
}
