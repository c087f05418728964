/* Memory for results of repeated calls (_repeats.c): small blocks of the pool's, used again and again.

   A Block is what a result's array lies on; when the last array is gone, its slot waits in the session's Slabs for the next
   result of its size. After _call_key.h, whose helpers it uses, and with PACKAGE defined. */

enum { ALIGNMENT = 64, CLASSES = 17, KEPT = 64, KEPT_BYTES = 4 << 20 };
/* Bytes, ipc/shm/memory.py; sizes: 64 bytes to 4 MiB; slots of each that wait at most, and bytes of them. */

typedef struct {
    PyObject *memory; /* the pool's view: its slot is free when that is gone */
    char *at;
} Slot;
typedef struct {
    PyObject_HEAD
    PyObject *allocate;
    int counts[CLASSES];
    Slot slots[CLASSES][KEPT];
} Slabs;
typedef struct {
    PyObject_HEAD
    Slabs *home;
    Slot slot;
    Py_ssize_t nbytes;
    int size_class; /* CLASSES for one that is not kept */
} Block;

static PyTypeObject *block_type;

static void Slabs_drop(Slabs *self) {
    for (int n = 0; n < CLASSES; n++)
        while (self->counts[n]) {
            PyObject *memory = self->slots[n][--self->counts[n]].memory;
            Py_DECREF(memory); /* may run Python: the count is right by now */
        }
}

static PyObject *Slabs_clear(Slabs *self, PyObject *unused) {
    (void)unused;
    Slabs_drop(self);
    Py_RETURN_NONE;
}

static PyObject *Slabs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *allocate;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &allocate)) return NULL;
    Slabs *self = (Slabs *)make(type);
    if (!self) return NULL;
    Py_INCREF(allocate);
    self->allocate = allocate;
    return (PyObject *)self;
}

static int Slabs_traverse(Slabs *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->allocate); /* it leads to the session */
    return 0;
}

static int Slabs_let_go(Slabs *self) {
    Slabs_drop(self);
    Py_CLEAR(self->allocate);
    return 0;
}

static void Slabs_dealloc(Slabs *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Slabs_let_go(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* A block, whose contents are undefined. Raises what the pool raises. */
static Block *take_block(Slabs *slabs, uint64_t nbytes) {
    Block *block = (Block *)make(block_type);
    if (!block) return NULL;
    int size_class = 0;
    while (size_class < CLASSES && ((uint64_t)ALIGNMENT << size_class) < nbytes) size_class++;
    Py_INCREF((PyObject *)slabs);
    block->home = slabs, block->nbytes = (Py_ssize_t)nbytes, block->size_class = size_class;
    if (size_class < CLASSES && slabs->counts[size_class]) {
        block->slot = slabs->slots[size_class][--slabs->counts[size_class]];
        return block;
    }
    uint64_t size = size_class < CLASSES ? (uint64_t)ALIGNMENT << size_class : nbytes;
    PyObject *asked = slabs->allocate ? PyLong_FromUnsignedLongLong(size) : NULL;
    PyObject *found = asked ? PyObject_CallFunctionObjArgs(slabs->allocate, asked, NULL) : NULL; /* (view, arena, offset) */
    PyObject *memory = found && PyTuple_Check(found) ? PyTuple_GetItem(found, 0) : NULL;
    Py_buffer view;
    if (memory && PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) == 0) {
        if ((uint64_t)view.len >= nbytes) {
            Py_INCREF(memory);
            block->slot = (Slot){memory, view.buf};
        }
        PyBuffer_Release(&view);
    }
    Py_XDECREF(asked);
    Py_XDECREF(found);
    if (!block->slot.memory) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the pool gives no memory");
        Py_CLEAR(block);
    }
    return block;
}

static int Block_traverse(Block *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->home); /* an open call of the lane may have the block, and home leads to the lane */
    return 0;
}

static int Block_clear(Block *self) {
    Py_CLEAR(self->home);
    return 0;
}

static void Block_dealloc(Block *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Slabs *home = self->home;
    Slot slot = self->slot;
    int size_class = self->size_class;
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
    int may_wait = size_class < CLASSES && home && home->counts[size_class] < KEPT &&
                   (home->counts[size_class] + 1) * ((int64_t)ALIGNMENT << size_class) <= KEPT_BYTES;
    if (slot.memory && may_wait)
        home->slots[size_class][home->counts[size_class]++] = slot;
    else
        Py_XDECREF(slot.memory);
    Py_XDECREF((PyObject *)home);
}

static int Block_getbuffer(Block *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, (PyObject *)self, self->slot.at, self->nbytes, 0, flags);
}

static PyMethodDef slabs_methods[] = {
    {"clear", (PyCFunction)Slabs_clear, METH_NOARGS, "clear(): give the pool what is free"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot Slabs_slots[] = {
    {Py_tp_new, Slabs_new}, {Py_tp_traverse, Slabs_traverse}, {Py_tp_clear, Slabs_let_go}, {Py_tp_dealloc, Slabs_dealloc},
    {Py_tp_methods, slabs_methods}, {0, NULL}};
static PyType_Spec Slabs_spec = {PACKAGE "_repeats.Slabs", sizeof(Slabs), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Slabs_slots};
static PyType_Slot Block_slots[] = {{Py_tp_traverse, Block_traverse}, {Py_tp_clear, Block_clear}, {Py_tp_dealloc, Block_dealloc},
                                    {Py_bf_getbuffer, Block_getbuffer}, {0, NULL}};
static PyType_Spec Block_spec = {PACKAGE "_repeats.Block", sizeof(Block), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, Block_slots};
