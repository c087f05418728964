/* The look at a call that accelerate makes, in C, for calls whose like was looked at before: whether it is taken over, by what, or
   why it is left. looking.py tells it what the Python has found; whatever is not plain goes to the Python, `anew`, each time.

   A call is known by its key: the rule, whether gradients are recorded, autocast and its dtype, plain values, and of each tensor device, dtype, whether it
   needs gradients, whether it is row-major, which argument is the same tensor, and its sizes: exactly, or by which of all sizes of the call are equal, 0, or 1. That is all
   that rules ask of sizes, but where they say so (Rule.of_sizes), and a cache that grows by a token is not another call each time. */

#define PACKAGE "layerzero.torch.acceleration."
#pragma GCC diagnostic ignored "-Wunused-function" /* of calls on a GPU */
#include "../../client/gpu/_call_key.h"

enum { MAX_SIZES = 64, MAX_GIVEN = 32 };
enum { OP, PLAN, IS_COMPOSITE, OF_SIZES }; /* of functions.Rule */
enum { ROW_MAJOR = 1, TOKEN_MAJOR = 2 };
static const long BY_LABEL = 0, NEVER = 2; /* as functions.py; between them EXACT */

/* What it is told by Python; the last ones change. */
#define LOOKS(X) \
    X(known) X(anew) X(watched) X(failed) X(took) X(count_first) X(counts) X(names) X(codes) X(module) X(thread) X(kernels) X(session) \
    X(refused) X(native_turn) X(our_turn) X(slower) X(not_faster) X(forward_ad) X(profiler) X(key_sets) X(plain_keys) X(outside) \
    X(dispatch_keys) X(included) X(function_modes) X(graph_task) X(functorch_level) X(is_grad_on) X(is_autocast) X(is_autocast_for) \
    X(autocast_dtype) X(saved_hooks) \
    X(flash_enabled) X(sdp_order) X(dtype) X(tensor) X(parameter) X(size) X(exchange) X(outside_layer) \
    X(layers) X(listener) X(orders) X(is_exact)
#define NAMES(X) \
    X(is_ours) X(ops) X(is_running) X(raw_repr) X(_current_level) X(_is_profiler_enabled) X(turn) X(note) X(last) X(record) X(kernel_id) \
    X(lane) X(f_back) X(f_locals) X(co_argcount) X(co_varnames) X(__name__) X(takeover) X(is_all) X(is_within) X(looks) \
    X(_is_compiling_flag) X(counts)

NAMES(NAME)
static PyObject *nothing, *first_arguments; /* ""; names that a module has as a first argument */

static const char *const looks_names[] = {LOOKS(TEXT)};
enum { LOOKS_FIELDS = sizeof looks_names / sizeof *looks_names };
typedef union {
    struct { LOOKS(FIELD) };
    PyObject *of[LOOKS_FIELDS];
} LooksFields;
typedef struct {
    PyObject_HEAD
    LooksFields its;
} Looks;

static PyTypeObject *looks_type;

/* One call. `whole`: what torch's function is called with, which begins with `keys` where torch's dispatcher has brought it. All are
   the caller's. */
typedef struct {
    PyObject *rule, *function, *whole, *keys, *args, *kwargs;
    long above; /* so many frames of ours are above the caller's */
} Seen;

LIFE(Looks, LOOKS_FIELDS)

static PyObject *Looks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Looks *self = (Looks *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, looks_names, LOOKS_FIELDS, self->its.of) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- what holds in this thread: PLAIN where nothing does that only the Python knows to deal with */

static int is_value(PyObject *found, PyObject *wanted) { /* takes the first reference */
    Py_XDECREF(found);
    return found ? found == wanted : -1;
}

static int is_number(PyObject *found, long wanted) { /* takes the reference */
    long number = found ? PyLong_AsLong(found) : -1;
    int is_failed = !found || (number == -1 && PyErr_Occurred());
    Py_XDECREF(found);
    return is_failed ? -1 : number == wanted;
}

static Verdict plain_if(int truth) { return truth > 0 ? PLAIN : truth ? leave() : OTHERS; }

/* Whether a set of dispatch keys is among those in a set or map of numbers. */
static int is_among(PyObject *keys, PyObject *those) {
    PyObject *number = keys ? PyObject_CallMethodObjArgs(keys, s_raw_repr, NULL) : NULL;
    int found = number ? PySequence_Contains(those, number) : -1;
    Py_XDECREF(number);
    return found;
}

/* Whether a value is no tensor, or one of a kind that kernels take. */
static int is_plain_kind(Looks *self, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type != self->its.tensor && type != self->its.parameter) return 1;
    PyObject *keys = PyObject_CallFunctionObjArgs(self->its.dispatch_keys, value, NULL);
    int truth = is_among(keys, self->its.key_sets);
    Py_XDECREF(keys);
    return truth;
}

static Verdict is_plain_here(Looks *self, const Seen *seen) {
    const LooksFields *its = &self->its;
    int truth = is_number(PyObject_CallNoArgs(its->graph_task), -1);
    if (truth > 0) truth = is_value(PyObject_CallNoArgs(its->functorch_level), Py_None);
    if (truth > 0) truth = is_number(PyObject_GetAttr(its->forward_ad, s__current_level), -1);
    if (truth > 0) truth = is_value(PyObject_GetAttr(its->kernels, s_is_running), Py_False);
    if (truth > 0 && seen->keys) return plain_if(is_among(seen->keys, its->plain_keys));
    PyObject *name, *value;
    Py_ssize_t at = 0, count = PyTuple_Size(seen->args);
    for (Py_ssize_t n = 0; truth > 0 && n < count; n++) truth = is_plain_kind(self, PyTuple_GetItem(seen->args, n));
    while (truth > 0 && seen->kwargs && PyDict_Next(seen->kwargs, &at, &name, &value)) truth = is_plain_kind(self, value);
    return plain_if(truth);
}

/* Whether attention is torch's choice, or flash attention is first; of other orders the Python knows more. */
static Verdict is_flash_first(Looks *self) {
    int truth = is_value(PyObject_CallNoArgs(self->its.flash_enabled), Py_True);
    PyObject *order = truth > 0 ? PyObject_CallNoArgs(self->its.sdp_order) : NULL;
    if (truth > 0) truth = order ? PySequence_Contains(self->its.orders, order) : -1;
    Py_XDECREF(order);
    return plain_if(truth);
}

/* Whether nobody else of torch's has a part in it, where gradients and autocast are off; as calls.is_alone. */
static int is_alone(Looks *self, PyObject *keys) {
    int truth = 1;
    if (!keys) {
        PyObject *included = PyObject_CallNoArgs(self->its.included);
        truth = is_among(included, self->its.outside);
        Py_XDECREF(included);
    }
    if (truth > 0) truth = is_number(PyObject_CallNoArgs(self->its.function_modes), 0);
    if (truth > 0) truth = is_value(PyObject_GetAttr(self->its.profiler, s__is_profiler_enabled), Py_False);
    return truth;
}

#include "_look_key.h"
#include "_look_layers.h"

/* --- what becomes of a call */

static PyObject *op_of(const Seen *seen) { return PyTuple_GetItem(seen->rule, OP); }

static PyObject *native(const Seen *seen) { return PyObject_Call(seen->function, seen->whole, seen->kwargs); }

static PyObject *leave_to_torch(Looks *self, const Seen *seen, PyObject *layer, PyObject *why) {
    return count(self, layer, op_of(seen), why, nothing, nothing) < 0 ? NULL : native(seen);
}

/* By the Python, which remembers what it finds where it is told the key: of tensors only where all is plain. */
static PyObject *look_anew(Looks *self, const Seen *seen, PyObject *key, int is_plain) {
    PyObject *keys = seen->keys ? seen->keys : Py_None, *kwargs = seen->kwargs ? seen->kwargs : Py_None;
    PyObject *above = PyLong_FromLong(seen->above);
    if (!above) return NULL;
    PyObject *found = PyObject_CallFunctionObjArgs(self->its.anew, seen->rule, seen->function, seen->args, kwargs, keys,
                                                   key ? key : Py_None, is_plain ? Py_True : Py_False, above, NULL);
    Py_DECREF(above);
    return found;
}

/* Our arguments: by their places among torch's, or as they were found; kwargs' values follow the others. */
static PyObject *gather(const Seen *seen, PyObject *places, PyObject *constants) {
    PyObject *of[MAX_GIVEN], *name, *value;
    Py_ssize_t at = 0, count = PyTuple_Size(seen->args), used = 0, wanted = PyTuple_Size(places);
    for (; used < count && used < MAX_GIVEN; used++) of[used] = PyTuple_GetItem(seen->args, used);
    while (seen->kwargs && used < MAX_GIVEN && PyDict_Next(seen->kwargs, &at, &name, &value)) of[used++] = value;
    PyObject *made = wanted < 0 ? NULL : PyTuple_New(wanted);
    for (Py_ssize_t n = 0; made && n < wanted; n++) {
        long place = PyLong_AsLong(PyTuple_GetItem(places, n));
        PyObject *one = place < 0 ? PyTuple_GetItem(constants, n) : place < used ? of[place] : NULL;
        Py_XINCREF(one);
        if (!one || PyTuple_SetItem(made, n, one) < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a call has fewer arguments than the one like it");
            Py_CLEAR(made);
        }
    }
    return made;
}

/* Counts a call that has ended well, by the kernel that the session's last record names; of other records the Python knows more. */
static int count_taken(Looks *self, PyObject *layer, PyObject *op, PyObject *session) {
    PyObject *last = PyObject_GetAttr(session, s_last), *record = last ? PyObject_GetAttr(last, s_record) : NULL;
    PyObject *kernel = NULL, *path = NULL;
    int status = -1, is_plain = 0;
    if (record && PyTuple_Check(record) && PyTuple_Size(record) == 9)
        is_plain = !PyObject_Size(PyTuple_GetItem(record, 5)) && !PyObject_Size(PyTuple_GetItem(record, 7));
    PyErr_Clear();
    if (is_plain) {
        PyObject *decision = PyTuple_GetItem(record, 6);
        if ((kernel = PyObject_GetAttr(decision, s_kernel_id)) && (path = PyObject_GetAttr(decision, s_lane)))
            status = count(self, layer, op, nothing, kernel, path);
    } else {
        PyObject *done = PyObject_CallFunctionObjArgs(self->its.took, layer, op, session, NULL);
        status = done ? 0 : -1;
        Py_XDECREF(done);
    }
    Py_XDECREF(path);
    Py_XDECREF(kernel);
    Py_XDECREF(record);
    Py_XDECREF(last);
    return status;
}

/* The result of our call, or a text that says why there is none: by `kernel`, or where that is NULL as `watched` makes it. */
static PyObject *run(Looks *self, PyObject *layer, PyObject *op, PyObject *kernel, PyObject *call, PyObject *given, PyObject *session) {
    const LooksFields *its = &self->its;
    PyObject *type, *error, *trace, *why = NULL, *found;
    if (kernel) {
        if (PyObject_SetAttr(its->thread, s_is_ours, Py_True) < 0) return NULL;
        found = PyObject_Call(kernel, given, NULL);
        PyErr_Fetch(&type, &error, &trace);
        if (PyObject_SetAttr(its->thread, s_is_ours, Py_False) < 0) Py_CLEAR(found);
        else PyErr_Restore(type, error, trace);
    } else {
        found = PyObject_CallFunctionObjArgs(its->watched, layer, call, given, session, NULL);
    }
    if (found && count_taken(self, layer, op, session) < 0) Py_CLEAR(found);
    if (found || !PyErr_ExceptionMatches(PyExc_Exception)) return found;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    why = PyObject_CallFunctionObjArgs(its->failed, op, given, error, NULL); /* raises it where it is not ours */
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return why;
}

/* Whether this kind of calls is ours at this turn: PLAIN; UNKNOWN where it is torch's, OTHERS where it is timed. */
static Verdict turn_of(Looks *self, PyObject *trial) {
    if (trial == Py_None) return PLAIN;
    PyObject *turn = PyObject_CallMethodObjArgs(trial, s_turn, NULL);
    Py_XDECREF(turn); /* it is a member of an enumeration */
    return !turn ? FAILED : turn == self->its.our_turn ? PLAIN : turn == self->its.native_turn ? UNKNOWN : OTHERS;
}

enum { CALL, KERNEL, PLACES, CONSTANTS, TRIAL }; /* of looking.Site */

static PyObject *take_over(Looks *self, const Seen *seen, PyObject *key, const Sizes *sizes, PyObject *site, PyObject *layer) {
    const LooksFields *its = &self->its;
    PyObject *op = op_of(seen), *kernel = PyTuple_GetItem(site, KERNEL), *session = NULL, *given = NULL, *found = NULL;
    if (its->layers != Py_None) {
        PyObject *both = PyTuple_Pack(2, layer, op);
        int is_chosen = both ? PySequence_Contains(its->layers, both) : -1;
        Py_XDECREF(both);
        if (is_chosen <= 0) return is_chosen ? NULL : leave_to_torch(self, seen, layer, its->not_faster);
    }
    int truth = !PyDict_Size(its->refused);
    if (truth > 0 && sizes->needs_grad) truth = is_value(PyObject_CallFunctionObjArgs(its->saved_hooks, Py_True, NULL), Py_None);
    if (truth > 0 && !(session = PyObject_CallNoArgs(its->session))) truth = -1; /* not connected: the Python says so */
    Verdict turn = truth > 0 ? turn_of(self, PyTuple_GetItem(site, TRIAL)) : plain_if(truth);
    if (turn == PLAIN && its->listener != Py_None) {
        PyObject *heard = PyObject_CallMethodObjArgs(its->listener, s_note, op, NULL);
        if (!heard) turn = FAILED;
        Py_XDECREF(heard);
    }
    int is_by_kernel = turn == PLAIN && kernel != Py_None && !sizes->needs_grad && !sizes->is_autocast ? is_alone(self, seen->keys) : 0;
    if (is_by_kernel < 0) turn = FAILED;
    if (turn == UNKNOWN)
        found = leave_to_torch(self, seen, layer, its->slower);
    else if (turn == OTHERS)
        found = look_anew(self, seen, key, 1);
    else if (turn == PLAIN && (given = gather(seen, PyTuple_GetItem(site, PLACES), PyTuple_GetItem(site, CONSTANTS)))) {
        PyObject *call = PyTuple_GetItem(site, CALL); /* whose backward pass is watched, where there may be one */
        found = run(self, layer, op, is_by_kernel ? kernel : sizes->needs_grad ? NULL : call, call, given, session);
        if (found && PyUnicode_CheckExact(found)) { /* why there is none */
            PyObject *why = found;
            found = leave_to_torch(self, seen, layer, why);
            Py_DECREF(why);
        }
    }
    Py_XDECREF(given);
    Py_XDECREF(session);
    return found;
}

/* Whether a call of this op is looked at: none within one of ours, and only those of the model's ops whose turn it is. */
static int is_looked_at(Looks *self, PyObject *op) {
    PyObject *thread = self->its.thread, *ops = NULL;
    int truth = is_value(PyObject_GetAttr(thread, s_is_ours), Py_False);
    if (truth > 0 && !(ops = PyObject_GetAttr(thread, s_ops))) truth = -1;
    if (truth > 0 && ops != Py_None) truth = PySequence_Contains(ops, op);
    Py_XDECREF(ops);
    return truth;
}

static PyObject *look_at(Looks *self, const Seen *seen) {
    PyObject *op = op_of(seen), *bytes = NULL, *site = NULL, *layer = NULL, *found = NULL;
    Key key;
    Sizes sizes;
    int is_seen = op ? is_looked_at(self, op) : -1;
    if (is_seen <= 0) return is_seen ? NULL : native(seen);
    Verdict verdict = write_look(self, seen, &key, &sizes);
    if (verdict == PLAIN) {
        bytes = PyBytes_FromStringAndSize(key.bytes, (Py_ssize_t)key.used);
        site = bytes ? PyDict_GetItemWithError(self->its.known, bytes) : NULL;
        if (!bytes || PyErr_Occurred()) verdict = FAILED;
        Py_XINCREF(site);
    }
    int is_written = site && PyUnicode_CheckExact(site); /* it says why, of what is written in the call */
    if (verdict == PLAIN && !is_written) verdict = is_plain_here(self, seen);
    if (verdict == PLAIN && !is_written && !PyUnicode_CompareWithASCIIString(op, "attention")) verdict = is_flash_first(self);
    if (verdict != FAILED && (!site || verdict != PLAIN))
        found = look_anew(self, seen, bytes, verdict == PLAIN);
    else if (verdict == PLAIN && (layer = layer_of(self, seen->above))) {
        PyObject *why = is_written ? site : PyTuple_Size(site) == 1 ? PyTuple_GetItem(site, 0) : NULL;
        found = why ? leave_to_torch(self, seen, layer, why) : take_over(self, seen, bytes, &sizes, site, layer);
    }
    Py_XDECREF(layer);
    Py_XDECREF(site);
    Py_XDECREF(bytes);
    return found;
}

static PyObject *Looks_call(Looks *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 5 || !PyTuple_Check(given[0]) || !PyTuple_Check(given[2]) || !(given[3] == Py_None || PyDict_Check(given[3]))) {
        PyErr_SetString(PyExc_TypeError, "call(rule, function, args, kwargs, above)");
        return NULL;
    }
    long above = PyLong_AsLong(given[4]);
    if (above == -1 && PyErr_Occurred()) return NULL;
    PyObject *kwargs = given[3] == Py_None ? NULL : given[3];
    Seen seen = {.rule = given[0], .function = given[1], .whole = given[2], .args = given[2], .kwargs = kwargs, .above = above};
    return look_at(self, &seen);
}

static PyObject *Looks_learn(Looks *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    return learn_all(kwargs, looks_names, LOOKS_FIELDS, self->its.of);
}

static PyMethodDef looks_methods[] = {
    {"call", (PyCFunction)(void (*)(void))Looks_call, METH_FASTCALL, "call(rule, function, args, kwargs, above): ours or torch's"},
    {"learn", (PyCFunction)(void (*)(void))Looks_learn, METH_VARARGS | METH_KEYWORDS, "learn(listener=..., ...)"},
    {NULL, NULL, 0, NULL},
};

SLOTS_OF("_look", Looks, {Py_tp_methods, looks_methods},)

/* --- an op of torch's that is overridden, as seam.py has it: what torch's dispatcher calls. `own`: torch's kernel, called with the
   dispatch keys and the arguments; `call`: the Python, for what is not plain. */

#define OVERRIDE(X) X(rule) X(own) X(call) X(here) X(compiler) X(is_for_all)
static const char *const override_names[] = {OVERRIDE(TEXT)};
enum { OVERRIDE_FIELDS = sizeof override_names / sizeof *override_names };
typedef union {
    struct { OVERRIDE(FIELD) };
    PyObject *of[OVERRIDE_FIELDS];
} OverrideFields;
typedef struct {
    PyObject_HEAD
    OverrideFields its;
} Override;

LIFE(Override, OVERRIDE_FIELDS)

static PyObject *Override_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Override *self = (Override *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, override_names, OVERRIDE_FIELDS, self->its.of) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* The looks of whoever takes over here: PLAIN; UNKNOWN where the call is torch's, OTHERS where the Python must see. */
static Verdict looks_here(Override *self, PyObject **looks) {
    const OverrideFields *its = &self->its;
    PyObject *takeover = PyObject_GetAttr(its->here, s_takeover), *ops = NULL;
    if (!takeover) return FAILED;
    Verdict verdict = PLAIN;
    if (takeover == Py_None) {
        verdict = its->is_for_all == Py_True ? OTHERS : UNKNOWN; /* attention may be another's */
    } else {
        int truth = is_value(PyObject_GetAttr(its->here, s_is_within), Py_False);
        if (truth > 0) truth = is_value(PyObject_GetAttr(its->compiler, s__is_compiling_flag), Py_False);
        if (truth <= 0) verdict = truth ? FAILED : UNKNOWN;
        if (verdict == PLAIN) {
            truth = is_value(PyObject_GetAttr(its->here, s_is_all), Py_True);
            if (truth > 0 && !(ops = PyObject_GetAttr(takeover, s_ops))) truth = -1;
            if (truth > 0) truth = PySequence_Contains(ops, PyTuple_GetItem(its->rule, OP));
            if (truth > 0 && !(*looks = PyObject_GetAttr(takeover, s_looks))) truth = -1;
            if (truth > 0) truth = Py_TYPE(*looks) == looks_type;
            if (truth <= 0) verdict = truth ? FAILED : OTHERS;
        }
    }
    Py_XDECREF(ops);
    Py_DECREF(takeover);
    return verdict;
}

static PyObject *Override_call(Override *self, PyObject *whole, PyObject *kwargs) {
    const OverrideFields *its = &self->its;
    PyObject *looks = NULL, *args = NULL, *found = NULL, *type, *error, *trace;
    Verdict verdict = PyTuple_Size(whole) ? looks_here(self, &looks) : OTHERS;
    if (verdict == UNKNOWN) found = PyObject_Call(its->own, whole, kwargs);
    if (verdict == OTHERS) found = PyObject_Call(its->call, whole, kwargs);
    if (verdict == PLAIN && (args = PyTuple_GetSlice(whole, 1, PyTuple_Size(whole))) &&
        PyObject_SetAttr(its->here, s_is_within, Py_True) == 0) {
        PyObject *keys = PyTuple_GetItem(whole, 0);
        Seen seen = {.rule = its->rule, .function = its->own, .whole = whole, .keys = keys, .args = args, .kwargs = kwargs};
        found = look_at((Looks *)looks, &seen);
        PyErr_Fetch(&type, &error, &trace);
        if (PyObject_SetAttr(its->here, s_is_within, Py_False) < 0) Py_CLEAR(found);
        else PyErr_Restore(type, error, trace);
    }
    Py_XDECREF(args);
    Py_XDECREF(looks);
    return found;
}

SLOTS_OF("_look", Override, {Py_tp_call, Override_call},)

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_look", "The look at a call that accelerate makes.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__look(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    KEY_NAMES(INTERN)
    NAMES(INTERN)
    PyObject *looks = PyType_FromSpec(&Looks_spec), *override = PyType_FromSpec(&Override_spec);
    nothing = PyUnicode_InternFromString("");
    first_arguments = Py_BuildValue("(ssss)", "self", "module", "layer", "model"); /* as tally.py */
    looks_type = (PyTypeObject *)looks;
    if (!looks || !override || !nothing || !first_arguments || PyModule_AddObjectRef(made, "Looks", looks) < 0 ||
        PyModule_AddObjectRef(made, "Override", override) < 0)
        Py_CLEAR(made);
    Py_XDECREF(override);
    return made;
}
