/* What a call is known by: for _look.c, which says what of it is in the key. */

typedef struct {
    int64_t of[MAX_SIZES];
    int count, needs_grad, is_autocast;
    unsigned devices; /* a bit for each type of them, as DLPack has them */
    PyObject *tensors[MAX_GIVEN]; /* borrowed, in the order of the arguments */
    int tensor_count;
} Sizes;

/* Whether it is row-major; `swapped`: once its second and third dimension are exchanged. */
static int is_contiguous(const DLTensor *tensor, int swapped) {
    int64_t expected = 1;
    for (int n = tensor->ndim - 1; n >= 0; n--) {
        int at = swapped && n == 1 ? 2 : swapped && n == 2 ? 1 : n;
        if (!tensor->shape[at]) return 1;
        if (tensor->shape[at] != 1 && tensor->strides[at] != expected) return 0;
        expected *= tensor->shape[at];
    }
    return 1;
}

static Verdict append_plain_tensor(Looks *self, Key *key, Sizes *sizes, PyObject *tensor, int is_exact) {
    int needs_grad = has(tensor, s_requires_grad);
    if (needs_grad < 0) return leave();
    sizes->needs_grad |= needs_grad;
    KeyTypes types = {.exchange = self->its.exchange};
    DLTensor found;
    if (!look(&types, tensor, &found) || found.ndim > MAX_SIZES - sizes->count) return OTHERS;
    sizes->devices |= found.device_type >= 0 && found.device_type < 31 ? 1u << found.device_type : 1u << 31;
    if (sizes->tensor_count == MAX_GIVEN) return OTHERS;
    int32_t first = 0; /* the first argument that is this very tensor: a call of three is not one of the same one thrice */
    sizes->tensors[sizes->tensor_count++] = tensor;
    while (sizes->tensors[first] != tensor) first++;
    struct { char tag, needs_grad, layout, ndim; int32_t device_type, device, first; uint32_t dtype; } head;
    memset(&head, 0, sizeof head);
    head.tag = 'X', head.needs_grad = (char)needs_grad, head.ndim = (char)found.ndim;
    head.layout = (char)(is_contiguous(&found, 0) ? ROW_MAJOR : found.ndim == 4 && is_contiguous(&found, 1) ? TOKEN_MAJOR : 0);
    head.device_type = found.device_type, head.device = found.device, head.dtype = found.dtype, head.first = first;
    Verdict verdict = append(key, &head, sizeof head);
    if (verdict == PLAIN && is_exact) return append(key, found.shape, 8 * (size_t)found.ndim);
    char labels[MAX_SIZES];
    for (int n = 0; n < found.ndim; n++) {
        int label = 0;
        sizes->of[sizes->count] = found.shape[n];
        if (found.shape[n] > 1)
            while (sizes->of[label] != found.shape[n]) label++; /* the first of all that is as large */
        labels[n] = (char)(found.shape[n] > 1 ? label + 2 : found.shape[n]);
        sizes->count++;
    }
    return verdict == PLAIN ? append(key, labels, (size_t)found.ndim) : verdict;
}

static Verdict append_given(Looks *self, Key *key, Sizes *sizes, PyObject *value, int is_exact) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == self->its.tensor || type == self->its.parameter) return append_plain_tensor(self, key, sizes, value, is_exact);
    if (type == self->its.dtype) return append_number(key, ':', (int64_t)value);
    KeyTypes types = {.size = self->its.size};
    if (!PyList_CheckExact(value)) return append_value(&types, key, value);
    Verdict verdict = append(key, "L", 1);
    return verdict == PLAIN ? append_ints(key, PyList_AsTuple(value)) : verdict;
}

/* Of each type of device that there is among the tensors whether autocast is on for it, and to which dtype: rules ask for the one, and
   trials are of the other. */
static Verdict append_autocast(Looks *self, Key *key, const Sizes *sizes) {
    static const struct { unsigned bit; const char *name; } types[] = {{1u << 1, "cpu"}, {1u << 2, "cuda"}};
    unsigned left = sizes->devices;
    Verdict verdict = PLAIN;
    for (size_t n = 0; verdict == PLAIN && n < sizeof types / sizeof *types; n++) {
        if (!(left & types[n].bit)) continue;
        left &= ~types[n].bit;
        PyObject *name = PyUnicode_FromString(types[n].name), *dtype = NULL;
        int is_on = name ? is_true(PyObject_CallFunctionObjArgs(self->its.is_autocast_for, name, NULL)) : -1;
        if (is_on > 0 && !(dtype = PyObject_CallFunctionObjArgs(self->its.autocast_dtype, name, NULL))) is_on = -1;
        verdict = is_on < 0 ? leave() : append_number(key, is_on ? 'A' : 'a', (int64_t)dtype); /* of which there is one each */
        Py_XDECREF(dtype);
        Py_XDECREF(name);
    }
    return left && verdict == PLAIN ? OTHERS : verdict;
}

static Verdict write_look(Looks *self, const Seen *seen, Key *key, Sizes *sizes) {
    long of_sizes = PyLong_AsLong(PyTuple_GetItem(seen->rule, OF_SIZES));
    if (of_sizes == NEVER) return OTHERS;
    int is_exact = of_sizes != BY_LABEL || self->its.is_exact == Py_True;
    int is_grad_on = is_true(PyObject_CallNoArgs(self->its.is_grad_on));
    int is_autocast = is_grad_on < 0 ? -1 : is_true(PyObject_CallNoArgs(self->its.is_autocast));
    if (is_autocast < 0) return leave();
    PyObject *name, *value;
    Py_ssize_t at = 0, count = PyTuple_Size(seen->args);
    key->used = 0, key->count = 0, key->is_placed = 0, sizes->count = 0, sizes->needs_grad = 0, sizes->devices = 0, sizes->tensor_count = 0;
    Verdict verdict = append_number(key, (char)(2 * is_autocast + is_grad_on), (int64_t)seen->rule);
    for (Py_ssize_t n = 0; verdict == PLAIN && n < count; n++)
        verdict = append_given(self, key, sizes, PyTuple_GetItem(seen->args, n), is_exact);
    while (verdict == PLAIN && seen->kwargs && PyDict_Next(seen->kwargs, &at, &name, &value)) {
        verdict = append_text(key, name);
        if (verdict == PLAIN) verdict = append_given(self, key, sizes, value, is_exact);
    }
    sizes->needs_grad &= is_grad_on, sizes->is_autocast = is_autocast;
    return is_autocast && verdict == PLAIN ? append_autocast(self, key, sizes) : verdict;
}
