/* What torch's dispatcher calls in place of the kernels of registration.py, for calls that are plain: the same steps without Python's
   own. Whatever else there is goes to the Python, which each of these was given. calls.py makes them. */

#define PACKAGE "layerzero.torch."
#pragma GCC diagnostic ignored "-Wunused-function" /* of keys of calls */
#include "../client/gpu/_call_key.h"

enum { MAX_GUARDS = 64 };
enum { NEEDED, SAVED, ONLY_SHAPES, OTHER_GIVEN, NUMBERS }; /* of gradients.Kept */
static const long OUT = -1;                               /* among numbers; -2 is what is saved beside it */

#define NAMES(X) \
    X(__enter__) X(__exit__) X(raw_repr) X(_current_level) X(needs_input_grad) X(to_save) X(made)
NAMES(NAME)

/* A type whose fields are told by name. */
#define TYPE(Type, FIELDS_OF)                                                                                 \
    static const char *const Type##_names[] = {FIELDS_OF(TEXT)};                                              \
    enum { Type##_fields = sizeof Type##_names / sizeof *Type##_names };                                      \
    typedef union {                                                                                           \
        struct { FIELDS_OF(FIELD) };                                                                          \
        PyObject *of[Type##_fields];                                                                          \
    } Type##Fields;                                                                                           \
    typedef struct {                                                                                          \
        PyObject_HEAD                                                                                         \
        Type##Fields its;                                                                                     \
    } Type;                                                                                                   \
    LIFE(Type, Type##_fields)                                                                                 \
    static PyObject *Type##_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {                       \
        Type *self = (Type *)make(type);                                                                      \
        (void)args;                                                                                           \
        if (!self) return NULL;                                                                               \
        if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");                        \
        if (!kwargs || take_all(kwargs, Type##_names, Type##_fields, self->its.of) < 0) Py_CLEAR(self);       \
        return (PyObject *)self;                                                                              \
    }

/* --- below ADInplaceOrView: guards of torch's, kept, since each is entered and left again and again. The GIL guards these */

typedef struct { PyObject *enter, *leave; } Guard;
static Guard guards[MAX_GUARDS];
static int guard_count;

static int enter(PyObject *type, Guard *guard) {
    memset(guard, 0, sizeof *guard);
    if (guard_count) {
        *guard = guards[--guard_count];
    } else {
        PyObject *made = PyObject_CallNoArgs(type);
        if (made && (guard->enter = PyObject_GetAttr(made, s___enter__))) guard->leave = PyObject_GetAttr(made, s___exit__);
        Py_XDECREF(made);
    }
    PyObject *entered = guard->leave ? PyObject_CallNoArgs(guard->enter) : NULL;
    if (!entered) {
        Py_XDECREF(guard->enter);
        Py_XDECREF(guard->leave);
    }
    Py_XDECREF(entered);
    return entered ? 0 : -1;
}

/* What was found within the guard, or NULL with its error. */
static PyObject *leave_with(Guard *guard, PyObject *found) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *left = PyObject_CallFunctionObjArgs(guard->leave, Py_None, Py_None, Py_None, NULL);
    if (left && guard_count < MAX_GUARDS) {
        guards[guard_count++] = *guard;
    } else {
        Py_DECREF(guard->enter);
        Py_DECREF(guard->leave);
    }
    if (left) {
        PyErr_Restore(type, error, trace);
    } else {
        Py_CLEAR(found);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(left);
    return found;
}

/* --- what an op does below autograd. `only_here`: names that `call` does not know; `outs`: None, or of what writes and returns nothing,
   names whose values `call` is given as `out`, in one tuple; `repeatably` is called with `call` and its arguments */

#define KERNEL(X) X(call) X(by_torch) X(only_here) X(outs) X(is_deterministic) X(repeatably) X(guard)
TYPE(Kernel, KERNEL)
static PyTypeObject *kernel_type;

/* The options as `call` knows them, a new reference, NULL with an error, or without where there are none. */
static PyObject *options_of(Kernel *self, PyObject *kwargs) {
    const KernelFields *its = &self->its;
    Py_ssize_t unknown = PyTuple_Size(its->only_here), several = its->outs == Py_None ? 0 : PyTuple_Size(its->outs);
    if (!kwargs || (!unknown && !several)) {
        Py_XINCREF(kwargs);
        return kwargs;
    }
    PyObject *made = PyDict_Copy(kwargs), *outs = several && made ? PyTuple_New(several) : NULL;
    for (Py_ssize_t n = 0; made && n < unknown; n++) {
        PyObject *name = PyTuple_GetItem(its->only_here, n);
        int has_it = PyDict_Contains(made, name);
        if (has_it < 0 || (has_it && PyDict_DelItem(made, name) < 0)) Py_CLEAR(made);
    }
    for (Py_ssize_t n = 0; made && outs && n < several; n++) {
        PyObject *name = PyTuple_GetItem(its->outs, n), *out = PyDict_GetItemWithError(made, name);
        if (!out && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
        Py_XINCREF(out);
        if (!out || PyTuple_SetItem(outs, n, out) < 0 || PyDict_DelItem(made, name) < 0) Py_CLEAR(made);
    }
    if (made && several && (!outs || PyDict_SetItemString(made, "out", outs) < 0)) Py_CLEAR(made);
    Py_XDECREF(outs);
    return made;
}

/* `call` of these with one argument before them. */
static PyObject *call_with(PyObject *call, PyObject *first, PyObject *args, PyObject *kwargs) {
    Py_ssize_t count = PyTuple_Size(args);
    PyObject *all = PyTuple_New(count + 1), *found = NULL;
    for (Py_ssize_t n = 0; all && n <= count; n++) {
        PyObject *one = n ? PyTuple_GetItem(args, n - 1) : first;
        Py_INCREF(one);
        PyTuple_SetItem(all, n, one);
    }
    if (all) found = PyObject_Call(call, all, kwargs);
    Py_XDECREF(all);
    return found;
}

static PyObject *Kernel_call(Kernel *self, PyObject *args, PyObject *kwargs) {
    const KernelFields *its = &self->its;
    Guard guard;
    if (enter(its->guard, &guard) < 0) return NULL;
    PyObject *found = its->by_torch == Py_None ? NULL : PyObject_Call(its->by_torch, args, kwargs);
    if (found == Py_None) Py_CLEAR(found); /* it is ours */
    if (!found && !PyErr_Occurred()) {
        PyObject *options = options_of(self, kwargs);
        int is_strict = PyErr_Occurred() ? -1 : is_true(PyObject_CallNoArgs(its->is_deterministic));
        if (is_strict == 0) found = PyObject_Call(its->call, args, options);
        if (is_strict > 0) found = call_with(its->repeatably, its->call, args, options);
        Py_XDECREF(options);
        if (found && its->outs != Py_None) {
            Py_DECREF(found);
            Py_INCREF(found = Py_None);
        }
    }
    return leave_with(&guard, found);
}

SLOTS_OF("_calls", Kernel, {Py_tp_call, Kernel_call},)

static PyObject *run(PyObject *kernel, PyObject *args, PyObject *kwargs) {
    return Py_TYPE(kernel) == kernel_type ? Kernel_call((Kernel *)kernel, args, kwargs) : PyObject_Call(kernel, args, kwargs);
}

/* --- at Autograd. `python`: the kernel for what is not plain, which is given all that this was given. `apply`: of a
   torch.autograd.Function whose `forward` is a Forward, or None */

/* Whether a set of dispatch keys is among those numbers. */
static int is_among(PyObject *keys, PyObject *those) {
    PyObject *number = PyObject_CallMethodObjArgs(keys, s_raw_repr, NULL);
    int found = number ? PySequence_Contains(those, number) : -1;
    Py_XDECREF(number);
    return found;
}

static int is_wanted(PyObject *is_grad_on, PyObject *any_needs_grad, PyObject *args, PyObject *kwargs) {
    int truth = is_true(PyObject_CallNoArgs(is_grad_on));
    return truth > 0 ? is_true(PyObject_Call(any_needs_grad, args, kwargs)) : truth;
}

#define DIFFERENTIABLE(X) \
    X(run) X(apply) X(python) X(by_torch) X(forward_ad) X(plain) X(is_grad_on) X(any_needs_grad) X(is_functorch)
TYPE(Differentiable, DIFFERENTIABLE)

static PyObject *Differentiable_call(Differentiable *self, PyObject *whole, PyObject *kwargs) {
    const DifferentiableFields *its = &self->its;
    Py_ssize_t count = PyTuple_Size(whole);
    PyObject *args = count ? PyTuple_GetSlice(whole, 1, count) : NULL, *found = NULL;
    if (!args) return count ? NULL : PyObject_Call(its->python, whole, kwargs);
    if (its->by_torch != Py_None) found = PyObject_Call(its->by_torch, args, kwargs);
    if (found == Py_None) Py_CLEAR(found);
    if (!found && !PyErr_Occurred()) {
        PyObject *level = PyObject_GetAttr(its->forward_ad, s__current_level);
        long number = level ? PyLong_AsLong(level) : 0;
        int truth = PyErr_Occurred() ? -1 : number < 0 ? is_among(PyTuple_GetItem(whole, 0), its->plain) : 0;
        int needs_grad = truth > 0 ? is_wanted(its->is_grad_on, its->any_needs_grad, args, NULL) : 0;
        if (needs_grad > 0) truth = its->apply == Py_None || (kwargs && PyDict_Size(kwargs)) ? 0 : !is_true(PyObject_CallNoArgs(its->is_functorch));
        if (PyErr_Occurred()) truth = -1;
        Py_XDECREF(level);
        if (truth == 0) found = PyObject_Call(its->python, whole, kwargs);
        else if (truth > 0) found = needs_grad ? PyObject_Call(its->apply, args, NULL) : run(its->run, args, kwargs);
    }
    Py_DECREF(args);
    return found;
}

SLOTS_OF("_calls", Differentiable, {Py_tp_call, Differentiable_call},)

/* The `forward` of a torch.autograd.Function that is applied to plain calls without options. `kinds`: by what needs gradients, what is
   kept, as `kept_of` has said, and `made` where that is all; `has_also`: the second result is saved, too */

#define FORWARD(X) X(run) X(kinds) X(kept_of) X(has_also) X(watcher)
TYPE(Forward, FORWARD)

static PyObject *made_of(PyObject *kept, PyObject *shapes, PyObject *others, PyObject *seer) {
    PyObject *options = PyDict_New(), *made = options ? PyTuple_Pack(5, kept, options, shapes, others, seer) : NULL;
    Py_XDECREF(options);
    return made;
}

static PyObject *kind_of(Forward *self, PyObject *ctx) { /* borrowed */
    PyObject *needs = PyObject_GetAttr(ctx, s_needs_input_grad), *found = NULL, *kept, *none, *made = NULL, *both = NULL;
    if (needs && !(found = PyDict_GetItemWithError(self->its.kinds, needs)) && !PyErr_Occurred() &&
        (kept = PyObject_CallFunctionObjArgs(self->its.kept_of, needs, NULL))) {
        if ((none = PyTuple_New(0)) && (made = made_of(kept, none, none, Py_None)) && (both = PyTuple_Pack(2, kept, made)) &&
            PyDict_SetItem(self->its.kinds, needs, both) == 0)
            found = both; /* which the dict holds */
        Py_XDECREF(both);
        Py_XDECREF(made);
        Py_XDECREF(none);
        Py_DECREF(kept);
    }
    Py_XDECREF(needs);
    return found;
}

/* Of each of those the member of `whole`, where ctx is before the arguments, or a result; or the member's shape. */
static PyObject *gathered(PyObject *those, int is_named, int is_shape, PyObject *whole, PyObject *out, PyObject *also) {
    Py_ssize_t count = PyTuple_Size(those);
    PyObject *made = count < 0 ? NULL : PyTuple_New(count);
    for (Py_ssize_t n = 0; made && n < count; n++) {
        PyObject *one = PyTuple_GetItem(those, n), *number = is_named ? PyTuple_GetItem(one, 1) : one;
        long place = number ? PyLong_AsLong(number) : 0;
        PyObject *value = PyErr_Occurred() ? NULL : place >= 0 ? PyTuple_GetItem(whole, 1 + place) : place == OUT ? out : also;
        if (value && is_shape && value != Py_None) value = PyObject_GetAttr(value, s_shape);
        else Py_XINCREF(value);
        if (!value || PyTuple_SetItem(made, n, value) < 0) Py_CLEAR(made);
    }
    return made;
}

/* What the backward pass needs, where its ctx has it: tensors as save_for_backward leaves them, and the rest. */
static int keep(Forward *self, PyObject *whole, PyObject *out) {
    PyObject *ctx = PyTuple_GetItem(whole, 0), *also = Py_None, *kind = NULL, *save = NULL, *shapes = NULL, *others = NULL, *made = NULL;
    PyObject *seer = PyObject_CallNoArgs(self->its.watcher), *kept, *made_before;
    int is_kept = -1;
    if (self->its.has_also == Py_True) also = PyTuple_GetItem(out, 1);
    if (seer && also && (kind = kind_of(self, ctx)) && (kept = PyTuple_GetItem(kind, 0)) && (made_before = PyTuple_GetItem(kind, 1)) &&
        (save = gathered(PyTuple_GetItem(kept, NUMBERS), 0, 0, whole, out, also)) &&
        (shapes = gathered(PyTuple_GetItem(kept, ONLY_SHAPES), 1, 1, whole, NULL, NULL)) &&
        (others = gathered(PyTuple_GetItem(kept, OTHER_GIVEN), 1, 0, whole, NULL, NULL))) {
        int is_all = seer == Py_None && !PyTuple_Size(shapes) && !PyTuple_Size(others);
        if (is_all) Py_INCREF(made = made_before);
        else made = made_of(kept, shapes, others, seer);
        if (made && PyObject_SetAttr(ctx, s_to_save, save) == 0) is_kept = PyObject_SetAttr(ctx, s_made, made);
    }
    PyObject *mine[] = {seer, save, shapes, others, made};
    for (size_t n = 0; n < sizeof mine / sizeof *mine; n++) Py_XDECREF(mine[n]);
    return is_kept;
}

static PyObject *Forward_call(Forward *self, PyObject *whole, PyObject *kwargs) {
    (void)kwargs;
    PyObject *args = PyTuple_GetSlice(whole, 1, PyTuple_Size(whole)), *out = args ? run(self->its.run, args, NULL) : NULL;
    if (out && keep(self, whole, out) < 0) Py_CLEAR(out);
    Py_XDECREF(args);
    return out;
}

SLOTS_OF("_calls", Forward, {Py_tp_call, Forward_call},)

/* Of an op that writes into arguments: those at `places`, and the options of these `names`. */

#define WRITING(X) X(run) X(python) X(plain) X(is_grad_on) X(any_needs_grad) X(places) X(names) X(count)
TYPE(Writing, WRITING)

static PyObject *written(Writing *self, PyObject *args, PyObject *kwargs) {
    Py_ssize_t places = PyTuple_Size(self->its.places), names = PyTuple_Size(self->its.names);
    PyObject *made = PyList_New(places + names);
    for (Py_ssize_t n = 0; made && n < places + names; n++) {
        PyObject *name = n < places ? NULL : PyTuple_GetItem(self->its.names, n - places), *one = NULL;
        if (n < places) one = PyTuple_GetItem(args, PyLong_AsLong(PyTuple_GetItem(self->its.places, n)));
        else if (kwargs) one = PyDict_GetItemWithError(kwargs, name);
        if (!one && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
        Py_XINCREF(one);
        if (!one || PyList_SetItem(made, n, one) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *Writing_call(Writing *self, PyObject *whole, PyObject *kwargs) {
    const WritingFields *its = &self->its;
    Py_ssize_t count = PyTuple_Size(whole);
    PyObject *args = count ? PyTuple_GetSlice(whole, 1, count) : NULL, *found = NULL, *those = NULL, *counted = NULL;
    if (!args) return count ? NULL : PyObject_Call(its->python, whole, kwargs);
    int truth = is_among(PyTuple_GetItem(whole, 0), its->plain);
    if (truth > 0) {
        int is_refused = is_wanted(its->is_grad_on, its->any_needs_grad, args, kwargs);
        truth = is_refused < 0 ? -1 : !is_refused;
    }
    if (truth == 0) found = PyObject_Call(its->python, whole, kwargs);
    else if (truth > 0 && (those = written(self, args, kwargs)) && (counted = PyObject_CallFunctionObjArgs(its->count, those, NULL)))
        found = run(its->run, args, kwargs);
    Py_XDECREF(counted);
    Py_XDECREF(those);
    Py_DECREF(args);
    return found;
}

SLOTS_OF("_calls", Writing, {Py_tp_call, Writing_call},)

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_calls", "What torch's dispatcher calls.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__calls(void) {
    static const char *const names[] = {"Kernel", "Differentiable", "Forward", "Writing"};
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    KEY_NAMES(INTERN)
    NAMES(INTERN)
    PyType_Spec *specs[] = {&Kernel_spec, &Differentiable_spec, &Forward_spec, &Writing_spec};
    for (size_t n = 0; n < sizeof specs / sizeof *specs; n++) {
        PyObject *type = PyType_FromSpec(specs[n]);
        if (!type || PyModule_AddObjectRef(made, names[n], type) < 0) {
            Py_XDECREF(type);
            Py_DECREF(made);
            return NULL;
        }
        if (!n) kernel_type = (PyTypeObject *)type; /* the module holds it */
        Py_DECREF(type);
    }
    return made;
}
