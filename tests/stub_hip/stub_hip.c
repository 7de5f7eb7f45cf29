// A libamdhip64.so without hardware, for tests of the HIP driver: enough of the HIP runtime to load modules, copy
// memory and take launches. Device memory is host memory; a launch is recorded, and run only where the test has
// registered something that can (stub_hip_run_with). Settings: stub_common/stub.h.
//
// Build: cc -shared -fPIC -O1 -I tests/stub_common -o libamdhip64.so tests/stub_hip/stub_hip.c -lpthread

#include <elf.h>

#define DEFAULT_DEVICES "gfx1151"
#include "stub.h"

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

static __thread int current_device = 0;

// What a test can register to run real code objects. Its functions return codes of the runtime.

typedef struct {
  const void *image;
  size_t image_size;
  const char *symbol;
  void **parameters;
  uint64_t stream;
  unsigned grid[3], block[3], shared_bytes;
  int device;
} Launch;

static int (*find_kernel)(const void *image, size_t image_size, const char *symbol);
static int (*run_launch)(const Launch *launch);

void stub_hip_run_with(int (*find)(const void *, size_t, const char *), int (*run)(const Launch *)) {
  find_kernel = find;
  run_launch = run;
}

// The live allocations of a device, at most `most`; returns how many.
int stub_hip_allocations(int device, void **addresses, size_t *sizes, int most) {
  int count = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_ALLOCATIONS && count < most; i++)
    if (allocations[i].start && allocations[i].device == device) {
      addresses[count] = allocations[i].start;
      sizes[count++] = allocations[i].size;
    }
  pthread_mutex_unlock(&lock);
  return count;
}

// The module of a real code object, or NULL if `image` is no ELF file. Like the runtime, which is not told the size
// either, this takes it from the section headers, which compilers put last.
static Module *copy_elf(const char *image, int device) {
  Elf64_Ehdr header;
  if (memcmp(image, ELFMAG, SELFMAG)) return NULL;
  memcpy(&header, image, sizeof header);
  Module *made = calloc(1, sizeof *made);
  count(&live_modules, 1);
  made->device = device;
  made->image_size = header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
  made->image = malloc(made->image_size);
  memcpy(made->image, image, made->image_size);
  return made;
}

// A kernel of an ELF file, remembered in its module as those of a text are.
static int find_in_elf(Function **function, Module *module, const char *symbol) {
  if (!find_kernel || module->kernels == MAX_KERNELS) return NOT_FOUND;
  int code = find_kernel(module->image, module->image_size, symbol);
  if (code) return code;
  *function = &module->functions[module->kernels++];
  (*function)->module = module;
  snprintf((*function)->symbol, sizeof (*function)->symbol, "%s", symbol);
  return SUCCESS;
}

// Devices.

int hipInit(unsigned flags) {
  CALL("flags=%u", flags);
  return end(device_count() ? SUCCESS : NO_DEVICE);
}

int hipRuntimeGetVersion(int *version) {
  CALL("%s", "");
  *version = 70253211;
  return end(SUCCESS);
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

int hipModuleLoadData(Module **module, const char *image) {
  CALL("device=%d", current_device);
  *module = parse_image(image, current_device);
  if (!*module && run_launch) *module = copy_elf(image, current_device);
  return end(*module ? SUCCESS : INVALID_IMAGE);
}

int hipModuleUnload(Module *module) {
  CALL("device=%d", module->device);
  free(module->image);
  free(module);
  count(&live_modules, -1);
  return end(SUCCESS);
}

int hipModuleGetFunction(Function **function, Module *module, const char *symbol) {
  CALL("symbol=%s device=%d", symbol, current_device);
  *function = find_function(module, symbol);
  if (!*function && module->image) return end(find_in_elf(function, module, symbol));
  return end(*function ? SUCCESS : NOT_FOUND);
}

int hipModuleLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  char values[MAX_ARGUMENTS * 21];
  print_arguments(values, sizeof values, f, parameters);
  CALL("symbol=%s device=%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu extra=%d arguments=%s", f->symbol,
       current_device, gx, gy, gz, bx, by, bz, shared, (unsigned long long)(uintptr_t)stream, extra != NULL, values);
  // What the runtime refuses: a kernel of another device, and more LDS than there is.
  if (f->module->device != current_device) return end(INVALID_HANDLE);
  if (shared > 65536) return end(INVALID_VALUE);
  if (f->module->image) {
    Launch launch = {f->module->image, f->module->image_size, f->symbol, parameters, (uintptr_t)stream,
                     {gx, gy, gz}, {bx, by, bz}, shared, current_device};
    return end(run_launch(&launch));
  }
  return end(SUCCESS);
}

// Streams and events.

int hipStreamIsCapturing(void *stream, int *status) {
  CALL("stream=%llu", (unsigned long long)(uintptr_t)stream);
  *status = is_captured((uintptr_t)stream);
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
  count(&live_events, 1);
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
  count(&live_events, -1);
  return end(SUCCESS);
}

// Memory.

int hipMalloc(void **address, size_t size) {
  CALL("device=%d size=%zu", current_device, size);
  *address = take_memory(size, current_device);
  return end(*address ? SUCCESS : OUT_OF_MEMORY);
}

int hipFree(void *address) {
  CALL("address=%llu", (unsigned long long)(uintptr_t)address);
  return end(give_memory_back(address) ? SUCCESS : INVALID_DEVICE_POINTER);
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
  attributes->device = device_of(address);
  return end(attributes->device >= 0 ? SUCCESS : INVALID_VALUE);
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
