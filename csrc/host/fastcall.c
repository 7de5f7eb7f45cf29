// gristmill._fastcall: an eager call of the linear operator on torch tensors, without Python between check and launch.
//
// It takes the calls that are all alike and leaves every other one, those with a mistake in them included, to Python:
// `call` then returns None, and nothing has happened. Tensors are read through DLPack's exchange table, which torch
// offers as `Tensor.__dlpack_c_exchange_api__`; the driver's functions are addresses that Python found. So this links
// with nothing, and one build serves each Python from 3.10 on.

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

// DLPack 1.x: what is used of it, as its header lays it out.

typedef struct {
  int32_t type, id;
} Device;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DType;

typedef struct {
  void *data;
  Device device;
  int32_t ndim;
  DType dtype;
  int64_t *shape, *strides;  // in elements
  uint64_t byte_offset;
} Tensor;

typedef struct {
  uint32_t major, minor;
  void *previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void *object, Tensor *tensor);  // borrows; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} Exchange;

#define DLPACK_MAJOR 1

// cuLaunchKernel and hipModuleLaunchKernel, which agree.
typedef int (*Launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                      void **extra);

// cuCtxGetCurrent, or hipGetDevice into the lower half.
typedef int (*GetCurrent)(uint64_t *current);

// cuStreamIsCapturing and hipStreamIsCapturing.
typedef int (*IsCapturing)(void *stream, int *status);

// The values that a kernel can take: the fifteen names of dispatch/manifest.py, of which the first five here differ
// from call to call, and the null pointer.
enum { X, OUT, M_ROWS, X_ROW_STRIDE, OUT_ROW_STRIDE, VARYING, NUM_VALUES = 16 };
#define MAX_ARGUMENTS 64  // of an entry, as dispatch/manifest.py has it
#define MAX_RANGES 5      // the arrays of a weight
#define MAX_RANK 8        // of an output whose description is kept; above any in use, and any other is described anew

// A kernel with its launch, kept by Python as bytes.
typedef struct {
  void *function;
  unsigned grid[3], block[3], shared_bytes, num_arguments;
  int early_start;  // recorded into a graph it is launched in another way, by Python
  int64_t row_stride_limit;
  uint8_t sources[MAX_ARGUMENTS];  // of each argument: its place among the values
} Record;

// A weight on its device, with all that calls need.
typedef struct {
  const Exchange *exchange;
  Launch launch;
  GetCurrent get_current;
  IsCapturing is_capturing;
  uint64_t current;  // what get_current gives where the weight's device is current
  Device device;
  DType dtype;
  long long K, N, single_row_stride, single_out_row_stride;
  unsigned long long low_bits;
  uint64_t values[NUM_VALUES];
  struct {
    uint64_t start, end;
  } ranges[MAX_RANGES];  // of the weight's memory
  int num_ranges;
  // The arguments of `empty` for the last output, which the next call mostly asks for again, and x's extents of then.
  PyObject *allocation;
  int rank;
  int64_t leading[MAX_RANK];
  PyObject *tensor_type, *torch_dtype, *empty, *is_grad_enabled, *dispatch_depth, *is_profiling, *forward_ad;
  PyObject *choices, *raise_launch_error;
} Weight;

// Activations or results as a matrix.
typedef struct {
  uint64_t address, end;
  int64_t M, row_stride;
} Rows;

static const char WEIGHT[] = "gristmill._fastcall.weight";
static PyObject *record_name, *requires_grad_name, *level_name, *zero, *minus_one;

// Reads a tensor of `columns` columns whose rows lie at one stride; 0 if this is none, and no error is left.
static int read_rows(const Weight *weight, PyObject *object, int64_t columns, Tensor *tensor, Rows *rows) {
  if ((PyObject *)Py_TYPE(object) != weight->tensor_type) return 0;
  if (weight->exchange->tensor_from_object(object, tensor)) {
    PyErr_Clear();
    return 0;
  }
  if (memcmp(&tensor->device, &weight->device, sizeof(Device)) || memcmp(&tensor->dtype, &weight->dtype, sizeof(DType)))
    return 0;
  int inner = tensor->ndim - 1;
  if (inner < 0 || tensor->shape[inner] != columns || (columns != 1 && tensor->strides[inner] != 1)) return 0;
  rows->M = 1;
  rows->row_stride = columns;
  for (int i = inner - 1; i >= 0; i--) {
    int64_t extent = tensor->shape[i], stride = tensor->strides[i];
    if (extent == 1) continue;
    if (rows->M == 1)
      rows->row_stride = stride;
    else if (stride != rows->row_stride * rows->M)
      return 0;
    rows->M *= extent;
  }
  if (rows->M == 0) return 0;
  rows->address = (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset;
  rows->end = rows->address + (uint64_t)((rows->M - 1) * rows->row_stride + columns) * (tensor->dtype.bits / 8);
  return 1;
}

// Whether `function()` is `expected`, a singleton or small integer; -1 for an error.
static int gives(PyObject *function, PyObject *expected) {
  PyObject *found = PyObject_CallNoArgs(function);
  if (!found) return -1;
  int same = found == expected ? 1 : PyObject_RichCompareBool(found, expected, Py_EQ);
  Py_DECREF(found);
  return same;
}

// Whether nothing has to see the call as an operator: no dispatch mode, no profiler, no derivative that is wanted.
static int is_unobserved(const Weight *weight, PyObject *x) {
  int plain = gives(weight->dispatch_depth, zero);
  if (plain == 1) plain = gives(weight->is_profiling, Py_False);
  if (plain != 1) return plain;
  // Tensors have tangents within a level of forward-mode differentiation only.
  PyObject *level = PyDict_GetItemWithError(weight->forward_ad, level_name);
  if (!level) return PyErr_Occurred() ? -1 : 0;
  int no_level = PyObject_RichCompareBool(level, minus_one, Py_EQ);
  if (no_level != 1) return no_level;
  PyObject *requires_grad = PyObject_GetAttr(x, requires_grad_name);
  if (!requires_grad) return -1;
  Py_DECREF(requires_grad);
  return requires_grad == Py_False ? 1 : gives(weight->is_grad_enabled, Py_False);
}

// (shape, strides, dtype) of an output (..., N) with the leading extents of x.
static PyObject *describe_out(const Weight *weight, const Tensor *x) {
  PyObject *shape = PyTuple_New(x->ndim), *strides = PyTuple_New(x->ndim), *described = NULL;
  if (!shape || !strides) goto done;
  int64_t stride = 1;
  for (int i = x->ndim - 1; i >= 0; i--) {
    int64_t extent = i == x->ndim - 1 ? weight->N : x->shape[i];
    PyObject *extent_object = PyLong_FromLongLong(extent), *stride_object = PyLong_FromLongLong(stride);
    if (!extent_object || !stride_object) {
      Py_XDECREF(extent_object);
      Py_XDECREF(stride_object);
      goto done;
    }
    PyTuple_SetItem(shape, i, extent_object);
    PyTuple_SetItem(strides, i, stride_object);
    stride *= extent;
  }
  described = PyTuple_Pack(3, shape, strides, weight->torch_dtype);
done:
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  return described;
}

// A new tensor for the output. Another thread may come in between: what is used here is held here.
static PyObject *new_out(Weight *weight, const Tensor *x) {
  size_t size = (size_t)(x->ndim - 1) * sizeof(int64_t);
  PyObject *described = NULL;
  if (weight->rank == x->ndim && !memcmp(weight->leading, x->shape, size)) {
    described = Py_NewRef(weight->allocation);
  } else {
    described = describe_out(weight, x);
    if (!described) return NULL;
    if (x->ndim <= MAX_RANK) {
      PyObject *former = weight->allocation;
      weight->allocation = Py_NewRef(described);
      weight->rank = x->ndim;
      memcpy(weight->leading, x->shape, size);
      Py_XDECREF(former);
    }
  }
  PyObject *out = PyObject_Call(weight->empty, described, NULL);
  Py_DECREF(described);
  return out;
}

static int overlap(const Rows *rows, uint64_t start, uint64_t end) { return rows->address < end && start < rows->end; }

// Whether a tensor that the caller gave can be written: of x's leading extents, its rows apart, its memory its own.
static int is_fit(const Weight *weight, const Tensor *x, const Rows *x_rows, const Tensor *out, const Rows *out_rows) {
  if (out->ndim != x->ndim || memcmp(out->shape, x->shape, (size_t)(x->ndim - 1) * sizeof(int64_t))) return 0;
  if (out_rows->M > 1 && out_rows->row_stride < weight->N) return 0;
  if (overlap(out_rows, x_rows->address, x_rows->end)) return 0;
  for (int i = 0; i < weight->num_ranges; i++)
    if (overlap(out_rows, weight->ranges[i].start, weight->ranges[i].end)) return 0;
  return 1;
}

// The choice that Python made for this many rows at this alignment, with its record; 0 if there is none yet. The key is
// the one of PreparedWeight.choices in dispatch/prepared.py.
static int find_choice(const Weight *weight, int64_t M, uint64_t low_bits, PyObject **choice, PyObject **record) {
  PyObject *key = PyLong_FromLongLong(M << 4 | (int64_t)(low_bits & 15));
  if (!key) return -1;
  *choice = PyDict_GetItemWithError(weight->choices, key);
  Py_DECREF(key);
  if (!*choice) return PyErr_Occurred() ? -1 : 0;
  Py_INCREF(*choice);
  *record = PyObject_GetAttr(*choice, record_name);
  if (!*record) return -1;
  return PyBytes_Check(*record) && PyBytes_Size(*record) == sizeof(Record);
}

// The legacy default stream cannot be captured: beside a capture a launch on it fails, and the driver says why.
static int is_recorded(const Weight *weight, void *stream) {
  int status = 0;
  if (!stream) return 0;
  return weight->is_capturing(stream, &status) || status;
}

static int launch(const Weight *weight, const Record *record, const Rows *x, const Rows *out, void *stream) {
  // Of this call alone: threads share nothing.
  uint64_t values[NUM_VALUES];
  void *arguments[MAX_ARGUMENTS];
  memcpy(values, weight->values, sizeof values);
  values[X] = x->address;
  values[OUT] = out->address;
  values[M_ROWS] = (uint64_t)x->M;
  values[X_ROW_STRIDE] = (uint64_t)x->row_stride;
  values[OUT_ROW_STRIDE] = (uint64_t)out->row_stride;
  for (unsigned i = 0; i < record->num_arguments; i++) arguments[i] = &values[record->sources[i]];
  int status;
  // A launch waits where the stream's queue is full, perhaps for a callback that waits for the interpreter.
  Py_BEGIN_ALLOW_THREADS
  status = weight->launch(record->function, record->grid[0], record->grid[1], record->grid[2], record->block[0],
                          record->block[1], record->block[2], record->shared_bytes, stream, arguments, NULL);
  Py_END_ALLOW_THREADS
  return status;
}

static int find_stream(const Weight *weight, PyObject *given, void **stream) {
  if (given == Py_None) {
    if (!weight->exchange->current_stream(weight->device.type, weight->device.id, stream)) return 1;
  } else if (PyLong_Check(given)) {
    *stream = PyLong_AsVoidPtr(given);
    if (!PyErr_Occurred()) return 1;
  }
  PyErr_Clear();
  return 0;
}

// call(x, out or None, stream or None) -> out, or None where Python has to decide.
static PyObject *call(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  Weight *weight = PyCapsule_GetPointer(self, WEIGHT);
  if (!weight) return NULL;
  if (count != 3) {
    PyErr_Format(PyExc_TypeError, "call takes x, out and stream, got %zd arguments", count);
    return NULL;
  }
  PyObject *x = arguments[0], *out = arguments[1] == Py_None ? NULL : arguments[1], *choice = NULL, *record = NULL;
  Tensor x_tensor, out_tensor;
  Rows x_rows, out_rows;
  uint64_t current = 0;
  void *stream = NULL;
  if (!read_rows(weight, x, weight->K, &x_tensor, &x_rows)) Py_RETURN_NONE;
  int found = is_unobserved(weight, x);
  if (found < 0) return NULL;
  // Where the device is not current, neither is its context, nor would new memory lie on it.
  if (!found || weight->get_current(&current) || current != weight->current) Py_RETURN_NONE;
  if (!find_stream(weight, arguments[2], &stream)) Py_RETURN_NONE;
  if (out) {
    if (!read_rows(weight, out, weight->N, &out_tensor, &out_rows) ||
        !is_fit(weight, &x_tensor, &x_rows, &out_tensor, &out_rows))
      Py_RETURN_NONE;
    Py_INCREF(out);
  } else {
    if (!(out = new_out(weight, &x_tensor))) return NULL;
    if (!read_rows(weight, out, weight->N, &out_tensor, &out_rows)) {
      Py_DECREF(out);
      Py_RETURN_NONE;
    }
  }
  if (x_rows.M == 1) {
    x_rows.row_stride = weight->single_row_stride;
    out_rows.row_stride = weight->single_out_row_stride;
  }
  int64_t strides = x_rows.row_stride | out_rows.row_stride;
  uint64_t low_bits = x_rows.address | out_rows.address | (uint64_t)strides * 2 | weight->low_bits;
  found = find_choice(weight, x_rows.M, low_bits, &choice, &record);
  if (found == 1) {
    const Record *known = (const Record *)PyBytes_AsString(record);
    if (strides > known->row_stride_limit || (known->early_start && is_recorded(weight, stream))) {
      found = 0;
    } else {
      int status = launch(weight, known, &x_rows, &out_rows, stream);
      if (status) {
        Py_XDECREF(PyObject_CallFunction(weight->raise_launch_error, "Oi", choice, status));  // raises
        found = -1;
      }
    }
  }
  Py_XDECREF(choice);
  Py_XDECREF(record);
  if (found == 1) return out;
  Py_DECREF(out);
  if (found < 0) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef call_method = {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL,
                                  "call(x, out, stream) -> out, or None where Python has to decide"};

static void free_weight(PyObject *capsule) {
  Weight *weight = PyCapsule_GetPointer(capsule, WEIGHT);
  if (!weight) return;
  PyObject *objects[] = {
      weight->tensor_type,  weight->torch_dtype, weight->empty,   weight->is_grad_enabled,    weight->dispatch_depth,
      weight->is_profiling, weight->forward_ad,  weight->choices, weight->raise_launch_error, weight->allocation};
  for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) Py_XDECREF(objects[i]);
  PyMem_Free(weight);
}

// Fills `numbers` from a sequence of integers below 2**64; the count, or -1 with an error.
static Py_ssize_t read_numbers(PyObject *sequence, uint64_t *numbers, Py_ssize_t most, const char *what) {
  Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) return -1;
  if (count > most) {
    PyErr_Format(PyExc_ValueError, "%s: at most %zd, got %zd", what, most, count);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *number = PySequence_GetItem(sequence, i);
    if (!number) return -1;
    numbers[i] = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) return -1;
  }
  return count;
}

// The exchange table of a tensor type; NULL with an error if it has none that is known here.
static const Exchange *exchange_of(PyObject *type) {
  PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (!capsule) return NULL;
  const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);  // the table lives as long as the process
  if (exchange && (exchange->major != DLPACK_MAJOR || !exchange->tensor_from_object)) {
    PyErr_Format(PyExc_ValueError, "DLPack %u has no exchange table for here", exchange->major);
    return NULL;
  }
  return exchange;
}

static PyObject *bind(PyObject *module, PyObject *arguments, PyObject *names) {
  (void)module;
  static char *keywords[] = {
      "x", "choices", "raise_launch_error", "empty", "is_grad_enabled", "dispatch_depth", "is_profiling", "forward_ad",
      "launch", "get_current", "is_capturing", "current", "K", "N", "low_bits", "single_row_stride",
      "single_out_row_stride", "values", "ranges", NULL};
  PyObject *x, *choices, *raise_launch_error, *empty, *is_grad_enabled, *dispatch_depth, *is_profiling, *forward_ad;
  PyObject *values, *ranges;
  unsigned long long launch_address, get_current_address, is_capturing_address, current;
  uint64_t borders[2 * MAX_RANGES];
  Tensor tensor;
  Weight *weight = PyMem_Calloc(1, sizeof(Weight));
  if (!weight) return PyErr_NoMemory();
  PyObject *capsule = PyCapsule_New(weight, WEIGHT, free_weight);
  if (!capsule) {
    PyMem_Free(weight);
    return NULL;
  }
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "$OO!OOOOOO!KKKKLLKLLOO:bind", keywords, &x, &PyDict_Type,
                                   &choices, &raise_launch_error, &empty, &is_grad_enabled, &dispatch_depth,
                                   &is_profiling, &PyDict_Type, &forward_ad, &launch_address, &get_current_address,
                                   &is_capturing_address, &current, &weight->K, &weight->N, &weight->low_bits,
                                   &weight->single_row_stride, &weight->single_out_row_stride, &values, &ranges))
    goto error;
  weight->exchange = exchange_of((PyObject *)Py_TYPE(x));
  if (!weight->exchange || weight->exchange->tensor_from_object(x, &tensor)) goto error;
  weight->device = tensor.device;
  weight->dtype = tensor.dtype;
  weight->launch = (Launch)(uintptr_t)launch_address;
  weight->get_current = (GetCurrent)(uintptr_t)get_current_address;
  weight->is_capturing = (IsCapturing)(uintptr_t)is_capturing_address;
  weight->current = current;
  if (read_numbers(values, weight->values + VARYING, NUM_VALUES - VARYING - 1, "values") < 0) goto error;
  Py_ssize_t count = read_numbers(ranges, borders, 2 * MAX_RANGES, "ranges");
  if (count < 0) goto error;
  weight->num_ranges = (int)(count / 2);
  memcpy(weight->ranges, borders, (size_t)count * sizeof *borders);
  weight->torch_dtype = PyObject_GetAttrString(x, "dtype");
  if (!weight->torch_dtype) goto error;
  weight->tensor_type = Py_NewRef((PyObject *)Py_TYPE(x));
  weight->empty = Py_NewRef(empty);
  weight->is_grad_enabled = Py_NewRef(is_grad_enabled);
  weight->dispatch_depth = Py_NewRef(dispatch_depth);
  weight->is_profiling = Py_NewRef(is_profiling);
  weight->forward_ad = Py_NewRef(forward_ad);
  weight->choices = Py_NewRef(choices);
  weight->raise_launch_error = Py_NewRef(raise_launch_error);
  PyObject *bound = PyCFunction_New(&call_method, capsule);
  Py_DECREF(capsule);
  return bound;
error:
  Py_DECREF(capsule);
  return NULL;
}

static PyObject *make_record(PyObject *module, PyObject *arguments) {
  (void)module;
  unsigned long long function;
  long long limit;
  const char *sources;
  Py_ssize_t num_arguments;
  Record record = {0};
  if (!PyArg_ParseTuple(arguments, "K(III)(III)IpLy#:record", &function, &record.grid[0], &record.grid[1],
                        &record.grid[2], &record.block[0], &record.block[1], &record.block[2], &record.shared_bytes,
                        &record.early_start, &limit, &sources, &num_arguments))
    return NULL;
  int fits = num_arguments <= MAX_ARGUMENTS;
  for (Py_ssize_t i = 0; fits && i < num_arguments; i++) fits = (uint8_t)sources[i] < NUM_VALUES;
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "sources: at most 64, each below 16");
    return NULL;
  }
  record.function = (void *)(uintptr_t)function;
  record.num_arguments = (unsigned)num_arguments;
  record.row_stride_limit = limit;
  memcpy(record.sources, sources, (size_t)num_arguments);
  return PyBytes_FromStringAndSize((const char *)&record, sizeof record);
}

static PyMethodDef methods[] = {
    {"bind", (PyCFunction)(void (*)(void))bind, METH_VARARGS | METH_KEYWORDS,
     "bind(*, x, choices, ...) -> call, for one weight and tensors like x"},
    {"record", make_record, METH_VARARGS,
     "record(function, grid, block, shared_bytes, early_start, row_stride_limit, sources) -> bytes for a choice's "
     "`record`"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastcall", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fastcall(void) {
  record_name = PyUnicode_InternFromString("record");
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  level_name = PyUnicode_InternFromString("_current_level");
  zero = PyLong_FromLong(0);
  minus_one = PyLong_FromLong(-1);
  if (!record_name || !requires_grad_name || !level_name || !zero || !minus_one) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module && PyModule_AddIntConstant(module, "NULL_VALUE", NUM_VALUES - 1)) Py_CLEAR(module);
  return module;
}
