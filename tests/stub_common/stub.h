// What the stub drivers share: settings, the record of calls, failures on demand, the text that stands for a code
// object, and a table of device memory, which is host memory.
//
// A code object is text: "STUB\n", then a line per kernel: its symbol and the sizes of its arguments in bytes,
// "w4a16_gemm 8 8 4 8\n". It ends with a NUL.
//
// Environment, read at every call, so that a test may change it as it goes:
//   STUB_DEVICES    archs of the devices, separated by commas; the including file has the default; "" for none
//   STUB_LOG        file to which each call is appended as a line: name, then name=value pairs
//   STUB_FAIL       "hipMalloc=2": this call fails with this code; "hipMalloc@3=2": from its third one on;
//                   "hipMalloc#3=2": its third one alone
//   STUB_CAPTURING  a stream handle in decimal: that stream is being captured

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ARGUMENTS 64
#define MAX_KERNELS 64
#define MAX_ALLOCATIONS 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int last_error = 0;

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

static void record(const char *call, const char *format, ...) {
  const char *path = setting("STUB_LOG", "");
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
  const char *text = setting("STUB_FAIL", "");
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
    int alone = *rest == '#';
    if (*rest == '@' || alone) nth = strtol(rest + 1, (char **)&rest, 10);
    if (*rest == '=' && (++seen == nth || (!alone && seen > nth))) code = atoi(rest + 1);
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

// What has been made and not given back.

static int live_modules, live_events;

static void count(int *live, int change) { __atomic_add_fetch(live, change, __ATOMIC_RELAXED); }

// Devices.

static int device_count(void) {
  const char *text = setting("STUB_DEVICES", DEFAULT_DEVICES);
  int count = *text != 0;
  for (; *text; text++) count += *text == ',';
  return count;
}

static void device_arch(int device, char *arch, size_t size) {
  const char *text = setting("STUB_DEVICES", DEFAULT_DEVICES);
  while (device--) text = strchr(text, ',') + 1;
  snprintf(arch, size, "%.*s", (int)strcspn(text, ","), text);
}

struct Module;

typedef struct {
  struct Module *module;
  char symbol[128];
  int sizes[MAX_ARGUMENTS];
  int dynamic_shared_bytes;
  int arguments;
} Function;

typedef struct Module {
  int device;
  int kernels;
  Function functions[MAX_KERNELS];
  void *image;  // a copy of a code object that is no text, where the including file takes one; else NULL
  size_t image_size;
} Module;

// The module that a code object stands for, or NULL if it is none.
static Module *parse_image(const char *image, int device) {
  if (strncmp(image, "STUB\n", 5)) return NULL;
  Module *made = calloc(1, sizeof *made);
  count(&live_modules, 1);
  made->device = device;
  char *text = strdup(image + 5), *lines = NULL;
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
  return made;
}

static Function *find_function(Module *module, const char *symbol) {
  for (int i = 0; i < module->kernels; i++)
    if (!strcmp(module->functions[i].symbol, symbol)) return &module->functions[i];
  return NULL;
}

// The values that a launch's parameters point at, as text.
static void print_arguments(char *text, size_t size, const Function *function, void **parameters) {
  *text = 0;
  for (int i = 0; parameters && i < function->arguments; i++) {
    uint64_t value = 0;
    memcpy(&value, parameters[i], function->sizes[i]);
    size_t at = strlen(text);
    snprintf(text + at, size - at, "%s%llu", i ? "," : "", (unsigned long long)value);
  }
}

static int is_captured(uint64_t stream) { return stream && stream == strtoull(setting("STUB_CAPTURING", "0"), NULL, 10); }

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

// Device memory of `size` bytes, filled with a pattern; NULL if there is none.
static void *take_memory(size_t size, int device) {
  void *address;
  if (posix_memalign(&address, 256, size)) return NULL;
  memset(address, 0xA5, size);
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < MAX_ALLOCATIONS && allocations[i].start) i++;
  if (i < MAX_ALLOCATIONS) {
    allocations[i].start = address;
    allocations[i].size = size;
    allocations[i].device = device;
  }
  pthread_mutex_unlock(&lock);
  return i < MAX_ALLOCATIONS ? address : NULL;
}

// Whether `address` was the start of device memory, now given back.
static int give_memory_back(void *address) {
  pthread_mutex_lock(&lock);
  int i = allocation_of(address);
  int known = i >= 0 && allocations[i].start == address;
  if (known) allocations[i].start = NULL;
  pthread_mutex_unlock(&lock);
  if (known) free(address);
  return known;
}

// The device that owns `address`, or -1.
static int device_of(const void *address) {
  pthread_mutex_lock(&lock);
  int i = allocation_of(address);
  int device = i < 0 ? -1 : allocations[i].device;
  pthread_mutex_unlock(&lock);
  return device;
}

// How many modules, events and allocations there are.
void stub_live(int *modules, int *events, int *memory) {
  *modules = live_modules;
  *events = live_events;
  *memory = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_ALLOCATIONS; i++) *memory += allocations[i].start != NULL;
  pthread_mutex_unlock(&lock);
}
