/* Arguments of a function as they cross where none of them is copied: the tree of ipc/functions/values.py in msgpack, with nodes of
   arrays as ipc/functions/frames.py has them, and references to the memory that is lent. After _arenas.h and the key's types.

   Scalars, and arrays of NumPy and torch that lie in arenas; all other arguments are left to the Python, whose checks name what is
   wrong with them. */

enum { TREE_BYTES = 1024, MAX_GIVEN = 15, MAX_LENT = 8, MAX_DIMENSIONS = 16, FRAME_ALIGNMENT = 64, NODE_ITEMS = 7 };
enum { LIST_TAG = 0, ARRAY_TAG = 5 }; /* LIST and ARRAY of values.py */
#define LENDING_LAYOUT MAX_LENT, MAX_DIMENSIONS, FRAME_ALIGNMENT, NODE_ITEMS, LIST_TAG, ARRAY_TAG

typedef struct { size_t used; char bytes[TREE_BYTES]; } Tree;
typedef struct {
    const char *library, *dtype;
    uint64_t address, itemsize, nbytes, span; /* nbytes: of its elements; span: to the end of the last one */
    int ndim;
    int64_t shape[MAX_DIMENSIONS], strides[MAX_DIMENSIONS]; /* strides in elements, when it was measured */
    int range; /* that it lies in */
} Lent;
typedef struct { Arena arena; uint64_t low, high; } Range; /* of addresses */

/* --- msgpack */

static Verdict pack(Tree *tree, const void *from, size_t count) {
    if (count > TREE_BYTES - tree->used) return OTHERS;
    memcpy(tree->bytes + tree->used, from, count);
    tree->used += count;
    return PLAIN;
}

static Verdict pack_big(Tree *tree, uint8_t tag, uint64_t value, int count) { /* the last `count` bytes of it, the high ones first */
    uint8_t bytes[9] = {tag};
    for (int n = 0; n < count; n++) bytes[1 + n] = (uint8_t)(value >> 8 * (count - 1 - n));
    return pack(tree, bytes, 1 + (size_t)count);
}

static Verdict pack_unsigned(Tree *tree, uint64_t value) {
    if (value < 128) return pack_big(tree, (uint8_t)value, 0, 0);
    if (value < 1 << 8) return pack_big(tree, 0xCC, value, 1);
    if (value < 1 << 16) return pack_big(tree, 0xCD, value, 2);
    return value >> 32 ? pack_big(tree, 0xCF, value, 8) : pack_big(tree, 0xCE, value, 4);
}

static Verdict pack_text(Tree *tree, const char *text, size_t count) {
    Verdict verdict = count < 32 ? pack_big(tree, (uint8_t)(0xA0 | count), 0, 0)
        : count < 256 ? pack_big(tree, 0xD9, count, 1) : pack_big(tree, 0xDA, count, 2);
    return verdict == PLAIN ? pack(tree, text, count) : verdict;
}

static Verdict pack_bytes(Tree *tree, const char *bytes, size_t count) {
    Verdict verdict = count < 256 ? pack_big(tree, 0xC4, count, 1) : pack_big(tree, 0xC5, count, 2);
    return verdict == PLAIN ? pack(tree, bytes, count) : verdict;
}

static Verdict pack_list(Tree *tree, int count) { return pack_big(tree, (uint8_t)(0x90 | count), 0, 0); }

static Verdict pack_extents(Tree *tree, const int64_t *extents, int count) {
    Verdict verdict = count < 16 ? pack_list(tree, count) : pack_big(tree, 0xDC, (uint64_t)count, 2);
    for (int n = 0; verdict == PLAIN && n < count; n++) verdict = pack_unsigned(tree, (uint64_t)extents[n]);
    return verdict;
}

static Verdict pack_integer(Tree *tree, PyObject *value) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && PyErr_Occurred()) return leave();
    if (overflow) return OTHERS;
    return number >= 0 ? pack_unsigned(tree, (uint64_t)number) : pack_big(tree, 0xD3, (uint64_t)number, 8);
}

/* UNKNOWN for what is no scalar. */
static Verdict pack_scalar(Tree *tree, PyObject *value) {
    const char *text;
    char *bytes;
    Py_ssize_t count;
    if (value == Py_None) return pack_big(tree, 0xC0, 0, 0);
    if (PyBool_Check(value)) return pack_big(tree, value == Py_True ? 0xC3 : 0xC2, 0, 0);
    if (PyLong_CheckExact(value)) return pack_integer(tree, value);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        uint64_t bits;
        memcpy(&bits, &number, 8);
        return pack_big(tree, 0xCB, bits, 8);
    }
    if (PyUnicode_CheckExact(value)) { /* lone surrogates are the Python's */
        if (!(text = PyUnicode_AsUTF8AndSize(value, &count))) return leave();
        return count < TREE_BYTES ? pack_text(tree, text, (size_t)count) : OTHERS;
    }
    if (PyBytes_CheckExact(value)) {
        if (PyBytes_AsStringAndSize(value, &bytes, &count) < 0) return FAILED;
        return count < TREE_BYTES ? pack_bytes(tree, bytes, (size_t)count) : OTHERS;
    }
    return UNKNOWN;
}

/* --- arrays */

static const char *dtype_of(char format, uint64_t itemsize) {
    static const char *const floats[] = {"float16", "float32", "float64"}, *const is_signed[] = {"int8", "int16", "int32", "int64"},
                                                                         *const is_not[] = {"uint8", "uint16", "uint32", "uint64"};
    int by = itemsize == 1 ? 0 : itemsize == 2 ? 1 : itemsize == 4 ? 2 : itemsize == 8 ? 3 : -1;
    if (by < 0 || !format) return NULL;
    if (format == '?') return by == 0 ? "bool" : NULL;
    if (strchr("efd", format)) return by ? floats[by - 1] : NULL;
    if (strchr("bhilq", format)) return is_signed[by];
    return strchr("BHILQ", format) ? is_not[by] : NULL;
}

/* Of one whose strides are in bytes: in elements, those of extents of 1 as if it had no gaps; and its sizes. OTHERS for what cannot
   cross as it lies, and for one without elements. */
static Verdict measure(Lent *one) {
    uint64_t count = 1, last = 0;
    for (int n = one->ndim - 1; n >= 0; n--) {
        int64_t extent = one->shape[n], stride = one->strides[n], size = (int64_t)one->itemsize;
        if (extent <= 0 || extent > INT64_C(1) << 46 || count > UINT64_C(1) << 46) return OTHERS;
        if (extent == 1) stride = (int64_t)count * size;
        if (stride < 0 || stride % size || stride / size > (INT64_C(1) << 46) / extent) return OTHERS;
        one->strides[n] = stride / size;
        last += (uint64_t)(extent - 1) * (uint64_t)one->strides[n];
        if (count > (UINT64_C(1) << 46) / (uint64_t)extent) return OTHERS;
        count *= (uint64_t)extent;
    }
    one->nbytes = count * one->itemsize, one->span = (last + 1) * one->itemsize;
    return one->address && one->address % one->itemsize == 0 ? PLAIN : OTHERS;
}

static Verdict see_ndarray(Lent *one, PyObject *array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) < 0) return leave();
    Verdict verdict = view.ndim <= MAX_DIMENSIONS && view.format && strlen(view.format) == 1 ? PLAIN : OTHERS;
    if (verdict == PLAIN) {
        one->library = "numpy", one->itemsize = (uint64_t)view.itemsize, one->dtype = dtype_of(*view.format, one->itemsize);
        one->address = (uint64_t)view.buf, one->ndim = view.ndim;
        for (int n = 0; n < view.ndim; n++) one->shape[n] = view.shape[n], one->strides[n] = view.strides[n];
        verdict = one->dtype ? measure(one) : OTHERS;
    }
    PyBuffer_Release(&view);
    return verdict;
}

enum { DLPACK_CPU = 1, DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_BOOL = 6 };

static Verdict see_tensor(const KeyTypes *types, Lent *one, PyObject *tensor) {
    int is_refused = has(tensor, s_requires_grad);
    if (!is_refused) is_refused = is_true(PyObject_CallMethodObjArgs(tensor, s_is_neg, NULL));
    if (is_refused) return is_refused < 0 ? leave() : OTHERS;
    DLTensor found;
    if (!look(types, tensor, &found) || found.device_type != DLPACK_CPU || found.ndim > MAX_DIMENSIONS) return OTHERS;
    uint32_t code = found.dtype & 0xFF, bits = found.dtype >> 8 & 0xFF, lanes = found.dtype >> 16;
    if (lanes != 1 || bits % 8) return OTHERS;
    static const char formats[] = {[DLPACK_INT] = 'q', [DLPACK_UINT] = 'Q', [DLPACK_FLOAT] = 'd', [DLPACK_BOOL] = '?'};
    one->library = "torch", one->itemsize = bits / 8;
    one->dtype = code == DLPACK_BFLOAT && bits == 16 ? "bfloat16" : code < sizeof formats ? dtype_of(formats[code], one->itemsize) : NULL;
    if (!one->dtype) return OTHERS;
    one->address = (uint64_t)found.data + found.offset, one->ndim = found.ndim;
    for (int n = 0; n < found.ndim; n++) {
        if (found.strides[n] < 0 || found.strides[n] > INT64_C(1) << 46) return OTHERS;
        one->shape[n] = found.shape[n], one->strides[n] = found.strides[n] * (int64_t)one->itemsize;
    }
    return measure(one);
}

/* Where a range of its arena is made wider, or begun, for an array. */
static Verdict lend(Lent *one, Arena arena, Range *ranges, int *count) {
    uint64_t end = one->address + one->span;
    if (!fits(arena, one->address, one->span)) return OTHERS; /* in none, or in one that the broker does not know yet */
    int n = 0;
    while (n < *count && ranges[n].arena.address != arena.address) n++;
    if (n == MAX_LENT) return OTHERS;
    if (n == *count) ranges[(*count)++] = (Range){arena, one->address, end};
    if (one->address < ranges[n].low) ranges[n].low = one->address;
    if (end > ranges[n].high) ranges[n].high = end;
    one->range = n;
    return PLAIN;
}

static uint64_t start_of(const Range *range) {
    uint64_t offset = range->low - range->arena.address;
    return offset - offset % FRAME_ALIGNMENT;
}

static Verdict pack_array(Tree *tree, const Lent *one, const Range *ranges) {
    const Range *range = &ranges[one->range];
    Verdict verdict = pack_list(tree, NODE_ITEMS);
    if (verdict == PLAIN) verdict = pack_unsigned(tree, ARRAY_TAG);
    if (verdict == PLAIN) verdict = pack_text(tree, one->library, strlen(one->library));
    if (verdict == PLAIN) verdict = pack_text(tree, one->dtype, strlen(one->dtype));
    if (verdict == PLAIN) verdict = pack_extents(tree, one->shape, one->ndim);
    if (verdict == PLAIN) verdict = pack_extents(tree, one->strides, one->ndim);
    if (verdict == PLAIN) verdict = pack_unsigned(tree, (uint64_t)one->range);
    return verdict == PLAIN ? pack_unsigned(tree, one->address - range->arena.address - start_of(range)) : verdict;
}

/* Whether an argument is an array: PLAIN; UNKNOWN for what is none of these libraries'. */
static Verdict see_array(const KeyTypes *types, Lent *one, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (value == Py_None) return UNKNOWN; /* NoneType stands for types that are not known */
    if (type == types->array) return see_ndarray(one, value);
    return type == types->tensor || type == types->parameter ? see_tensor(types, one, value) : UNKNOWN;
}

static Verdict pack_arguments(const KeyTypes *types, const Arenas *arenas, PyObject *args, Tree *tree, Range *ranges, int *count,
                              uint64_t *nbytes) {
    Lent lent[MAX_GIVEN]; /* of the arguments that are arrays */
    char are_arrays[MAX_GIVEN];
    Py_ssize_t total = PyTuple_Size(args);
    if (total > MAX_GIVEN - 1) return OTHERS;
    for (Py_ssize_t n = 0; n < total; n++) {
        Verdict verdict = see_array(types, &lent[n], PyTuple_GetItem(args, n));
        are_arrays[n] = verdict == PLAIN;
        if (verdict == UNKNOWN) continue;
        if (verdict == PLAIN) verdict = lend(&lent[n], arena_of(arenas, lent[n].address), ranges, count);
        if (verdict != PLAIN) return verdict;
        *nbytes += lent[n].nbytes;
    }
    Verdict verdict = pack_list(tree, (int)total + 1);
    if (verdict == PLAIN) verdict = pack_unsigned(tree, LIST_TAG);
    for (Py_ssize_t n = 0; verdict == PLAIN && n < total; n++)
        verdict = are_arrays[n] ? pack_array(tree, &lent[n], ranges) : pack_scalar(tree, PyTuple_GetItem(args, n));
    return verdict == UNKNOWN ? OTHERS : verdict;
}
