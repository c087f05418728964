/* What a call is known by, as bytes: shared by _fastpath.c and _lifted.c for calls on a GPU, and by
   ../session/_repeats.c for those on the CPU, whose arrays are NumPy's in place of CuPy's (APPEND_ARRAY).

   All that settles a call is in them: op, values, backend, policy, and of each array kind, shape, strides, dtype. In place
   of its memory stands either the address, or only which alignment that has and which GPU it is on: `Key.is_placed`. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

#include "../../ipc/shm/_words.h"

enum { KEY_BYTES = 1024, KEY_ADDRESSES = 16 };

/* What it is told by Python: the policy of the moment, and the types of arrays. */
#define KEY_TYPES(X) X(policy) X(baked) X(dtypes) X(tensor) X(parameter) X(size) X(is_grad_enabled) X(exchange) X(array)
#define KEY_NAMES(X) \
    X(op) X(args) X(params) X(out) X(backend) X(timeout_s) X(output_bytes) X(is_rigid) X(text) X(requires_grad) X(is_neg) \
    X(data_ptr) X(get_device) X(shape) X(stride) X(strides) X(dtype) X(data) X(ptr) X(device_id) X(get)

#define FIELD(name) PyObject *name;
#define NAME(name) static PyObject *s_##name;
#define TEXT(name) #name,
#define INTERN(name) \
    if (!(s_##name = PyUnicode_InternFromString(#name))) return NULL;
KEY_NAMES(NAME)

typedef struct { KEY_TYPES(FIELD) } KeyTypes;
typedef struct { PyObject *op, *args, *params, *out, *backend; } Parts; /* of a request; references of its own */

typedef enum { FAILED = -1, OTHERS, UNKNOWN, PLAIN } Verdict; /* OTHERS: the Python's; UNKNOWN: not made before */

#ifndef PACKAGE
#define PACKAGE "layerzero.client.gpu."
#endif

typedef struct {
    int is_placed; /* addresses are in it; else they are beside it, in the order of the arguments, 0 for None */
    int count;
    uint64_t addresses[KEY_ADDRESSES];
    size_t used;
    char bytes[KEY_BYTES];
} Key;

#ifdef APPEND_ARRAY /* of another library than CuPy; its calls may have no arguments */
static Verdict APPEND_ARRAY(const KeyTypes *types, Key *key, PyObject *array);
enum { LEAST_ARGUMENTS = 0 };
#else
#define APPEND_ARRAY append_array
#define OF_CUPY
enum { LEAST_ARGUMENTS = 1 };
#endif

/* --- keyword arguments, by a table of names */

static int take(PyObject *given, const char *name, PyObject **found) { /* borrowed */
    *found = PyDict_GetItemString(given, name);
    if (!*found) PyErr_Format(PyExc_TypeError, "%s is missing", name);
    return *found != NULL;
}

static int take_all(PyObject *given, const char *const *names, int count, PyObject **of) {
    PyObject *found;
    for (int n = 0; n < count; n++) {
        if (!take(given, names[n], &found)) return -1;
        Py_INCREF(found);
        of[n] = found;
    }
    return 0;
}

static int take_numbers(PyObject *given, const char *const *names, int count, uint64_t *of) {
    PyObject *found;
    for (int n = 0; n < count; n++) {
        if (take(given, names[n], &found)) of[n] = PyLong_AsUnsignedLongLong(found);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static PyObject *make(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

/* The types of arrays, once their library is imported; by the names of the fields. */
static PyObject *learn_all(PyObject *kwargs, const char *const *names, int count, PyObject **of) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value)) {
        int n = 0;
        while (n < count && PyUnicode_CompareWithASCIIString(name, names[n])) n++;
        if (n == count) return PyErr_Format(PyExc_TypeError, "%U is not known here", name);
        PyObject *before = of[n];
        Py_INCREF(value);
        of[n] = value;
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

#define LIFE(Type, FIELDS)                                                   \
    static int Type##_traverse(Type *self, visitproc visit, void *arg) {    \
        Py_VISIT(Py_TYPE((PyObject *)self));                                 \
        for (int n = 0; n < FIELDS; n++) Py_VISIT(self->its.of[n]);          \
        return 0;                                                            \
    }                                                                        \
    static int Type##_clear(Type *self) {                                   \
        for (int n = 0; n < FIELDS; n++) Py_CLEAR(self->its.of[n]);          \
        return 0;                                                            \
    }                                                                        \
    static void Type##_dealloc(Type *self) {                                \
        PyTypeObject *type = Py_TYPE((PyObject *)self);                      \
        PyObject_GC_UnTrack(self);                                           \
        Type##_clear(self);                                                  \
        ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);                  \
        Py_DECREF(type);                                                     \
    }

#define SLOTS_OF(Module, Type, ...)                                                                            \
    static PyType_Slot Type##_slots[] = {{Py_tp_new, Type##_new}, {Py_tp_traverse, Type##_traverse},            \
                                         {Py_tp_clear, Type##_clear}, {Py_tp_dealloc, Type##_dealloc}, __VA_ARGS__ {0, NULL}}; \
    static PyType_Spec Type##_spec = {PACKAGE Module "." #Type, sizeof(Type), 0,                     \
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Type##_slots};

/* --- the key */

static Verdict append(Key *key, const void *from, size_t count) {
    if (count > KEY_BYTES - key->used) return OTHERS;
    if (count) memcpy(key->bytes + key->used, from, count); /* of an array without dimensions `from` may be null */
    key->used += count;
    return PLAIN;
}

static Verdict append_number(Key *key, char tag, int64_t number) {
    char packed[9] = {tag};
    memcpy(packed + 1, &number, 8);
    return append(key, packed, 9);
}

/* After a call that raised: what cannot be looked at is left to the Python, whose checks name it. */
static Verdict leave(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return FAILED;
    PyErr_Clear();
    return OTHERS;
}

static Verdict append_int(Key *key, char tag, PyObject *value) {
    long long number = PyLong_AsLongLong(value);
    return number == -1 && PyErr_Occurred() ? leave() : append_number(key, tag, number);
}

static Verdict append_text(Key *key, PyObject *value) {
    Py_ssize_t count;
    const char *text = PyUnicode_AsUTF8AndSize(value, &count);
    if (!text) return leave();
    Verdict verdict = append_number(key, 's', count);
    return verdict == PLAIN ? append(key, text, count) : verdict;
}

static Verdict append_ints(Key *key, PyObject *extents) { /* a tuple; takes the reference */
    if (!extents) return leave();
    Verdict verdict = PyTuple_Check(extents) ? append_number(key, '(', PyTuple_Size(extents)) : OTHERS;
    for (Py_ssize_t n = 0; verdict == PLAIN && n < PyTuple_Size(extents); n++)
        verdict = append_int(key, 'i', PyTuple_GetItem(extents, n));
    Py_DECREF(extents);
    return verdict;
}

static Verdict append_value(const KeyTypes *types, Key *key, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (value == Py_None) return append(key, "n", 1);
    if (PyBool_Check(value)) return append(key, value == Py_True ? "t" : "f", 1);
    if (PyLong_CheckExact(value)) return append_int(key, 'i', value);
    if (PyUnicode_CheckExact(value)) return append_text(key, value);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        int64_t bits;
        memcpy(&bits, &number, 8);
        return append_number(key, 'd', bits);
    }
    if (PyTuple_CheckExact(value) || type == types->size) {
        Py_INCREF(value);
        Verdict verdict = append(key, type == types->size ? "S" : "T", 1);
        if (verdict == PLAIN) return append_ints(key, value);
        Py_DECREF(value);
        return verdict;
    }
    return OTHERS;
}

static int is_true(PyObject *value) { /* takes the reference */
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

static int has(PyObject *owner, PyObject *name) { return is_true(PyObject_GetAttr(owner, name)); }

static int is_none(PyObject *owner, PyObject *name) {
    PyObject *value = PyObject_GetAttr(owner, name);
    Py_XDECREF(value);
    return value ? value == Py_None : -1;
}

/* The largest of the alignments of ipc/lifting/form.py that divides an address, by its place among them. */
static char alignment_class(uint64_t address) {
    if (!(address & 255)) return 5;
    if (!(address & 15)) return 4;
    return !(address & 7) ? 3 : !(address & 3) ? 2 : !(address & 1);
}

static Verdict append_pointer(Key *key, char tag, PyObject *pointer) { /* takes the reference */
    if (!pointer) return leave();
    uint64_t address = PyLong_AsUnsignedLongLong(pointer);
    Py_DECREF(pointer);
    if (PyErr_Occurred()) return leave();
    if (key->is_placed) return append_number(key, tag, (int64_t)address);
    char packed[2] = {tag, alignment_class(address)};
    if (key->count == KEY_ADDRESSES) return OTHERS;
    key->addresses[key->count++] = address;
    return append(key, packed, 2);
}

/* Of DLPack's C exchange (dlpack.h, 1.2 or later), which newer torch has: what getters tell, without objects. */
typedef struct { void *data; int32_t device_type, device; int32_t ndim; uint32_t dtype; int64_t *shape, *strides; uint64_t offset; } DLTensor;
typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *from_python, *to_python;
    int (*look)(void *, DLTensor *);
    void *stream;
} Exchange;

/* Whether a tensor could be looked at so; else the getters do it. */
static int look(const KeyTypes *types, PyObject *tensor, DLTensor *found) {
    if (!PyCapsule_CheckExact(types->exchange)) return 0;
    const Exchange *exchange = PyCapsule_GetPointer(types->exchange, "dlpack_exchange_api");
    if (exchange && exchange->major == 1 && exchange->look && !exchange->look(tensor, found) && found->strides) return 1;
    PyErr_Clear();
    return 0;
}

static Verdict append_looked(Key *key, char tag, const DLTensor *found) {
    struct { char tag, alignment; uint16_t ndim; int32_t device_type, device; uint32_t dtype; } head;
    uint64_t address = (uint64_t)found->data + found->offset;
    memset(&head, 0, sizeof head);
    head.tag = tag, head.ndim = (uint16_t)found->ndim, head.dtype = found->dtype;
    head.device_type = found->device_type, head.device = found->device;
    if (!key->is_placed) {
        if (key->count == KEY_ADDRESSES) return OTHERS;
        head.alignment = alignment_class(address);
        key->addresses[key->count++] = address;
    }
    Verdict verdict = append(key, &head, sizeof head);
    if (verdict == PLAIN && key->is_placed) verdict = append(key, &address, 8);
    if (verdict == PLAIN) verdict = append(key, found->shape, 8 * (size_t)found->ndim);
    return verdict == PLAIN ? append(key, found->strides, 8 * (size_t)found->ndim) : verdict;
}

static Verdict append_device(Key *key, PyObject *ordinal) { /* takes the reference */
    if (!ordinal) return leave();
    Verdict verdict = append_int(key, '@', ordinal);
    Py_DECREF(ordinal);
    return verdict;
}

static Verdict append_dtype(const KeyTypes *types, Key *key, PyObject *array) { /* by a number for each that is different */
    PyObject *dtype = PyObject_GetAttr(array, s_dtype);
    if (!dtype) return leave();
    PyObject *number = PyDict_GetItemWithError(types->dtypes, dtype), *made = NULL;
    if (!number && !PyErr_Occurred() && (made = PyLong_FromSsize_t(PyDict_Size(types->dtypes))) &&
        PyDict_SetItem(types->dtypes, dtype, made) == 0)
        number = made;
    Verdict verdict = number ? append_int(key, ':', number) : leave();
    Py_XDECREF(made);
    Py_DECREF(dtype);
    return verdict;
}

static Verdict append_tensor(const KeyTypes *types, Key *key, PyObject *tensor) {
    int has_grad = has(tensor, s_requires_grad);
    int is_refused = has_grad > 0 ? is_true(PyObject_CallNoArgs(types->is_grad_enabled)) : has_grad;
    if (!is_refused) is_refused = is_true(PyObject_CallMethodObjArgs(tensor, s_is_neg, NULL));
    if (is_refused) return is_refused < 0 ? leave() : OTHERS;
    DLTensor found;
    if (look(types, tensor, &found)) return append_looked(key, has_grad ? 'Y' : 'X', &found);
    Verdict verdict = append_pointer(key, has_grad ? 'G' : 'P', PyObject_CallMethodObjArgs(tensor, s_data_ptr, NULL));
    if (verdict == PLAIN && !key->is_placed) verdict = append_device(key, PyObject_CallMethodObjArgs(tensor, s_get_device, NULL));
    if (verdict == PLAIN) verdict = append_ints(key, PyObject_GetAttr(tensor, s_shape));
    if (verdict == PLAIN) verdict = append_ints(key, PyObject_CallMethodObjArgs(tensor, s_stride, NULL));
    return verdict == PLAIN ? append_dtype(types, key, tensor) : verdict;
}

#ifdef OF_CUPY
static Verdict append_array(const KeyTypes *types, Key *key, PyObject *array) { /* of CuPy */
    PyObject *data = PyObject_GetAttr(array, s_data);
    if (!data) return leave();
    Verdict verdict = append_pointer(key, 'C', PyObject_GetAttr(data, s_ptr));
    if (verdict == PLAIN && !key->is_placed) verdict = append_device(key, PyObject_GetAttr(data, s_device_id));
    Py_DECREF(data);
    if (verdict == PLAIN) verdict = append_ints(key, PyObject_GetAttr(array, s_shape));
    if (verdict == PLAIN) verdict = append_ints(key, PyObject_GetAttr(array, s_strides));
    return verdict == PLAIN ? append_dtype(types, key, array) : verdict;
}
#endif

static Verdict append_argument(const KeyTypes *types, Key *key, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (value == Py_None) {
        if (key->count == KEY_ADDRESSES) return OTHERS;
        key->addresses[key->count++] = 0;
        return append(key, "n", 1);
    }
    if (type == types->tensor || type == types->parameter) return append_tensor(types, key, value);
    return type == types->array ? APPEND_ARRAY(types, key, value) : UNKNOWN;
}

static Verdict append_policy(const KeyTypes *types, Key *key) {
    PyObject *policy = PyObject_CallNoArgs(types->policy);
    if (!policy) return leave();
    PyObject *text = NULL;
    Verdict verdict = PLAIN;
    if (policy == Py_None)
        verdict = append(key, "n", 1);
    else if ((text = PyObject_GetAttr(policy, s_text)))
        verdict = append_value(types, key, text);
    else
        verdict = leave();
    Py_XDECREF(text);
    Py_DECREF(policy);
    return verdict;
}

static Verdict write_key(const KeyTypes *types, PyObject *request, Parts *parts, Key *key) {
    PyObject *name, *value, *baked = PyObject_CallMethodObjArgs(types->baked, s_get, NULL);
    Py_ssize_t at = 0;
    if (!baked) return leave();
    Py_DECREF(baked);
    int is_plain = baked == Py_None ? is_none(request, s_timeout_s) : 0;
    if (is_plain > 0) is_plain = is_none(request, s_output_bytes);
    int is_rigid = is_plain > 0 ? has(request, s_is_rigid) : 0;
    if (is_plain < 0 || is_rigid < 0) return leave();
    if (!is_plain || is_rigid) return OTHERS;
    if (!(parts->op = PyObject_GetAttr(request, s_op)) || !(parts->args = PyObject_GetAttr(request, s_args)) ||
        !(parts->params = PyObject_GetAttr(request, s_params)) || !(parts->out = PyObject_GetAttr(request, s_out)) ||
        !(parts->backend = PyObject_GetAttr(request, s_backend)))
        return leave();
    if (!PyTuple_CheckExact(parts->args) || PyTuple_Size(parts->args) < LEAST_ARGUMENTS || !PyDict_CheckExact(parts->params)) return OTHERS;
    Verdict verdict = PLAIN; /* the arrays first: they tell a GPU's call from others */
    for (Py_ssize_t n = 0; verdict == PLAIN && n < PyTuple_Size(parts->args); n++)
        verdict = append_argument(types, key, PyTuple_GetItem(parts->args, n));
    if (verdict == PLAIN) verdict = append_argument(types, key, parts->out);
    if (verdict == PLAIN) verdict = append_value(types, key, parts->op);
    if (verdict == PLAIN) verdict = append_value(types, key, parts->backend);
    if (verdict == PLAIN) verdict = append_policy(types, key);
    while (verdict == PLAIN && PyDict_Next(parts->params, &at, &name, &value)) verdict = append_value(types, key, value);
    return verdict;
}

static void drop_parts(Parts *parts) {
    PyObject *mine[] = {parts->op, parts->args, parts->params, parts->out, parts->backend};
    for (size_t n = 0; n < sizeof mine / sizeof *mine; n++) Py_XDECREF(mine[n]);
}
