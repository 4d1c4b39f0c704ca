/*
 * Python's pickles, read and never run (protocols 2 to 5): a tree of values. What a pickle would call or build is an object in it, with the
 * callable's name, its arguments and its state; who knows the name may make sense of it (torch.c). Inside files.
 *
 * Source  Python's documentation of pickle and pickletools.
 */
#ifndef SPW_PICKLE_H
#define SPW_PICKLE_H

#include "files_internal.h"

typedef enum spw__py_kind {
    SPW__PY_NONE,
    SPW__PY_BOOL,
    SPW__PY_INT,
    SPW__PY_REAL,
    SPW__PY_TEXT,   /* str and bytes */
    SPW__PY_LIST,   /* list, tuple, set */
    SPW__PY_DICT,   /* items: key, value, key, value */
    SPW__PY_GLOBAL, /* text: "module.name" */
    SPW__PY_OBJECT, /* what calling callable with args gives; items: as a dict's, of a subclass of dict */
    SPW__PY_OUTSIDE /* "persistent id": args says what lies outside of the pickle */
} spw__py_kind;

/* A value. The same one may be in several places, and in itself: who follows items bounds the depth. */
typedef struct spw__py {
    spw__py_kind kind;
    uint64_t count, room; /* items */
    union {
        int64_t integer; /* of one that does not fit the nearest that does */
        double real;
        struct {
            const char *text; /* ends with a zero; bytes may hold others */
            uint64_t bytes;
        };
        struct {
            struct spw__py **items;
            const struct spw__py *callable, *args, *state;
        };
    };
} spw__py;

typedef struct spw__pickle spw__pickle;
/*
 * spw__pickle_parse - name: in messages, for the file. text may go once this returns.
 * Errors  SPW_ECORRUPT with the byte where it ends or makes no sense, SPW_EUNSUPPORTED for an opcode of protocol 0 or 1, SPW_ENOMEM.
 */
spw_status spw__pickle_parse(spw__pickle **out, const void *text, uint64_t bytes, const char *name, spw_error *err);
void spw__pickle_free(spw__pickle *p); /* NULL is fine */
const spw__py *spw__pickle_root(const spw__pickle *p);

/* Those below take NULL and any kind, and answer NULL or false where there is no such thing. */

/* The value of a text key, of a dict or an object that is one. */
const spw__py *spw__py_get(const spw__py *v, const char *key);
/* An attribute of an object, as its state has it. */
const spw__py *spw__py_attribute(const spw__py *v, const char *name);
const spw__py *spw__py_item(const spw__py *list, uint64_t i);
/* An object of this callable: "torch._utils._rebuild_tensor_v2". */
bool spw__py_is(const spw__py *v, const char *callable);
const char *spw__py_text(const spw__py *v);
/* Also of an Enum's member: one argument. */
bool spw__py_int(const spw__py *v, int64_t *out);
bool spw__py_real(const spw__py *v, double *out);
/* As JSON, as far as JSON has such things: None is null, other objects are left out. json_decref; NULL: no memory, or nothing of it. */
struct json_t *spw__py_json(const spw__py *v);

#endif
