/* Whose call it is, and the count of it, as tally.py has them: for _look.c. */

static PyObject *number_of(const void *address) { return PyLong_FromVoidPtr((void *)address); } /* as id() has it */

/* The name of a code's first argument where that may be a module, else "". Borrowed. */
static PyObject *first_of(Looks *self, PyObject *code) {
    PyObject *number = number_of(code), *known = number ? PyDict_GetItemWithError(self->its.codes, number) : NULL;
    PyObject *names = NULL, *kept = NULL, *first = NULL;
    if (number && !known && !PyErr_Occurred() && (names = PyObject_GetAttr(code, s_co_varnames))) {
        int has_one = has(code, s_co_argcount), is_module = 0;
        PyObject *name = has_one > 0 ? PyTuple_GetItem(names, 0) : NULL;
        if (name) is_module = PySequence_Contains(first_arguments, name);
        if (has_one >= 0 && is_module >= 0 && (kept = PyTuple_Pack(2, code, is_module > 0 ? name : nothing)) &&
            PyDict_SetItem(self->its.codes, number, kept) == 0)
            known = kept;
    }
    if (known) first = PyTuple_GetItem(known, 1);
    Py_XDECREF(kept);
    Py_XDECREF(names);
    Py_XDECREF(number);
    return first;
}

/* The layer that `owner` is, NULL without an error where it is none. */
static PyObject *named(Looks *self, PyObject *owner) {
    int is_module = PyObject_IsInstance(owner, self->its.module);
    PyObject *number = is_module > 0 ? number_of(owner) : NULL;
    PyObject *name = number ? PyDict_GetItemWithError(self->its.names, number) : NULL;
    Py_XINCREF(name);
    if (number && !name && !PyErr_Occurred()) name = PyObject_GetAttr((PyObject *)Py_TYPE(owner), s___name__);
    Py_XDECREF(number);
    return name;
}

static PyObject *layer_of(Looks *self, long above) {
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *found = NULL;
    Py_XINCREF(frame);
    for (long n = 0; frame && frame != Py_None && n < 6 + above && !found; n++) {
        PyObject *code = n < above ? NULL : (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *first = code ? first_of(self, code) : NULL;
        if (first && PyUnicode_GetLength(first)) {
            PyObject *locals = PyObject_GetAttr(frame, s_f_locals), *owner = locals ? PyObject_GetItem(locals, first) : NULL;
            if (owner) found = named(self, owner);
            else if (locals && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear(); /* deleted by its function */
            Py_XDECREF(owner);
            Py_XDECREF(locals);
        }
        Py_XDECREF(code);
        PyObject *back = found || PyErr_Occurred() ? NULL : PyObject_GetAttr(frame, s_f_back);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    if (PyErr_Occurred()) Py_CLEAR(found);
    else if (!found) Py_INCREF(found = self->its.outside_layer);
    return found;
}

static int count(Looks *self, PyObject *layer, PyObject *op, PyObject *why, PyObject *kernel, PyObject *path) {
    PyObject *key = PyTuple_Pack(5, layer, op, why, kernel, path), *counts = NULL, *sum = NULL;
    if (!key) return -1;
    int status = -1;
    if (!(counts = PyObject_GetAttr(self->its.counts, s_counts))) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) { /* the first one of this thread */
            PyErr_Clear();
            sum = PyObject_CallFunctionObjArgs(self->its.count_first, key, NULL);
            status = sum ? 0 : -1;
        }
    } else {
        PyObject *before = PyDict_GetItemWithError(counts, key);
        long long number = before ? PyLong_AsLongLong(before) : 0;
        if (!PyErr_Occurred() && (sum = PyLong_FromLongLong(number + 1))) status = PyDict_SetItem(counts, key, sum);
    }
    Py_XDECREF(sum);
    Py_XDECREF(counts);
    Py_DECREF(key);
    return status;
}
