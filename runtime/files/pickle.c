/*
 * Reading pickles: the machine of Python's pickle module, on values that are never more than data. A pickle is a program whose calls
 * could do anything when Python runs it; here a call is written down. Each opcode makes at most one value or adds to one, so memory
 * is bounded by the pickle's length.
 */
#include "pickle.h"
#include <string.h>

enum { BLOCK_BYTES = 1 << 16 };

/* Memory of a pickle's values, given back at once. */
typedef struct block {
    struct block *next;
    uint64_t used, bytes;
    char data[];
} block;

struct spw__pickle {
    const char *name;
    const unsigned char *text;
    uint64_t at, bytes;
    block *blocks;
    spw__py **stack, **memo;
    uint64_t *marks;
    uint64_t stack_count, mark_count, memo_count, stack_bytes, mark_bytes, memo_bytes;
    const spw__py *root;
    spw_error *err;
};

/* ---------------------------------------------------------------- memory */

static void *
take(spw__pickle *p, uint64_t bytes)
{
    block *b = p->blocks;
    bytes = (bytes + 7) / 8 * 8;
    if (b == NULL || bytes > b->bytes - b->used) {
        uint64_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        b = spw_mem_zalloc(sizeof *b + room);
        if (b == NULL)
            return NULL;
        b->bytes = room;
        b->next = p->blocks;
        p->blocks = b;
    }
    b->used += bytes;
    return b->data + b->used - bytes;
}

static spw_status
no_memory(spw__pickle *p)
{
    return SPW_RAISE(p->err, SPW_ENOMEM, "%s", p->name);
}

static spw_status
add_item(spw__pickle *p, spw__py *v, spw__py *item)
{
    if (v->count == v->room) {
        uint64_t room = v->room > 0 ? v->room * 2 : 4;
        spw__py **items = take(p, room * sizeof(spw__py *));
        if (items == NULL)
            return no_memory(p);
        if (v->count > 0)
            memcpy(items, v->items, v->count * sizeof *items);
        v->items = items;
        v->room = room;
    }
    v->items[v->count++] = item;
    return SPW_OK;
}

/* ---------------------------------------------------------------- stack */

static spw_status
broken(spw__pickle *p, const char *what)
{
    return SPW_RAISE(p->err, SPW_ECORRUPT, "%s: damaged pickle: %s at byte %llu of %llu", p->name, what,
                     (unsigned long long)p->at, (unsigned long long)p->bytes);
}

static spw_status
push(spw__pickle *p, spw__py *v)
{
    if (v == NULL)
        return no_memory(p);
    if (!spw_mem_grow((void **)&p->stack, &p->stack_bytes, (p->stack_count + 1) * sizeof *p->stack,
                      p->stack_count * sizeof *p->stack))
        return no_memory(p);
    p->stack[p->stack_count++] = v;
    return SPW_OK;
}

static spw__py *
make(spw__pickle *p, spw__py_kind kind)
{
    spw__py *v = take(p, sizeof *v);
    if (v != NULL)
        v->kind = kind;
    return v;
}

/* How many values lie above the last mark, or in all. */
static uint64_t
above_mark(const spw__pickle *p)
{
    return p->stack_count - (p->mark_count > 0 ? p->marks[p->mark_count - 1] : 0);
}

/* The n-th value from the top, from 1 on, above the last mark; NULL and an error: there is none. */
static spw__py *
top(spw__pickle *p, uint64_t n)
{
    if (above_mark(p) < n) {
        (void)broken(p, "a value is missing");
        return NULL;
    }
    return p->stack[p->stack_count - n];
}

/* What lies above the last mark, which goes with it. */
static spw_status
pop_mark(spw__pickle *p, spw__py ***values, uint64_t *count)
{
    if (p->mark_count == 0)
        return broken(p, "a mark is missing");
    *count = above_mark(p);
    p->stack_count -= *count;
    *values = *count > 0 ? p->stack + p->stack_count : NULL;
    p->mark_count--;
    return SPW_OK;
}

/* ---------------------------------------------------------------- arguments of opcodes */

static spw_status
next_bytes(spw__pickle *p, uint64_t n, const unsigned char **out)
{
    if (n > p->bytes - p->at)
        return broken(p, "cut off");
    *out = p->text + p->at;
    p->at += n;
    return SPW_OK;
}

/* Little-endian, n bytes. */
static spw_status
next_uint(spw__pickle *p, uint64_t n, uint64_t *out)
{
    const unsigned char *b = NULL;
    SPW_TRY(next_bytes(p, n, &b));
    *out = 0;
    for (uint64_t i = 0; i < n; i++)
        *out |= (uint64_t)b[i] << (8 * i);
    return SPW_OK;
}

static spw_status
push_int(spw__pickle *p, int64_t x, spw__py_kind kind)
{
    spw__py *v = make(p, kind);
    if (v != NULL)
        v->integer = x;
    return push(p, v);
}

/* n bytes, two's complement. */
static spw_status
push_long(spw__pickle *p, uint64_t n)
{
    const unsigned char *b = NULL;
    uint64_t x = 0;
    bool negative, fits = true;
    SPW_TRY(next_bytes(p, n, &b));
    negative = n > 0 && (b[n - 1] & 0x80) != 0;
    for (uint64_t i = 0; i < n; i++) {
        if (i < 8)
            x |= (uint64_t)b[i] << (8 * i);
        else
            fits = fits && b[i] == (negative ? 0xff : 0);
    }
    for (uint64_t i = n; i < 8 && negative; i++)
        x |= (uint64_t)0xff << (8 * i);
    if (!fits || (n >= 8 && (x >> 63 != 0) != negative))
        x = negative ? (uint64_t)INT64_MIN : (uint64_t)INT64_MAX;
    return push_int(p, (int64_t)x, SPW__PY_INT);
}

static spw_status
push_text(spw__pickle *p, uint64_t n)
{
    const unsigned char *b = NULL;
    spw__py *v;
    char *text;
    SPW_TRY(next_bytes(p, n, &b));
    v = make(p, SPW__PY_TEXT);
    text = take(p, n + 1);
    if (v == NULL || text == NULL)
        return no_memory(p);
    memcpy(text, b, n);
    v->text = text;
    v->bytes = n;
    return push(p, v);
}

static spw_status
push_real(spw__pickle *p)
{
    const unsigned char *b = NULL;
    uint64_t bits = 0;
    spw__py *v;
    SPW_TRY(next_bytes(p, 8, &b)); /* big-endian, alone among numbers */
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | b[i];
    v = make(p, SPW__PY_REAL);
    if (v != NULL)
        memcpy(&v->real, &bits, sizeof bits);
    return push(p, v);
}

static spw_status
push_global(spw__pickle *p, const char *module, uint64_t module_bytes, const char *name, uint64_t name_bytes)
{
    spw__py *v = make(p, SPW__PY_GLOBAL);
    char *text = take(p, module_bytes + name_bytes + 2);
    if (v == NULL || text == NULL)
        return no_memory(p);
    memcpy(text, module, module_bytes);
    text[module_bytes] = '.';
    memcpy(text + module_bytes + 1, name, name_bytes);
    v->text = text;
    v->bytes = module_bytes + 1 + name_bytes;
    return push(p, v);
}

/* Two lines: module and name. */
static spw_status
read_global(spw__pickle *p)
{
    const char *line[2];
    uint64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        const unsigned char *end = memchr(p->text + p->at, '\n', p->bytes - p->at);
        if (end == NULL)
            return broken(p, "a name that does not end");
        line[i] = (const char *)p->text + p->at;
        bytes[i] = (uint64_t)(end - p->text) - p->at;
        p->at += bytes[i] + 1;
    }
    return push_global(p, line[0], bytes[0], line[1], bytes[1]);
}

static spw_status
stack_global(spw__pickle *p)
{
    const spw__py *name = top(p, 1), *module = top(p, 2);
    if (module == NULL)
        return SPW_ECORRUPT;
    if (name->kind != SPW__PY_TEXT || module->kind != SPW__PY_TEXT)
        return broken(p, "a name that is no text");
    p->stack_count -= 2;
    return push_global(p, module->text, module->bytes, name->text, name->bytes);
}

/* ---------------------------------------------------------------- values of values */

/* The last n values as a tuple in their place. */
static spw_status
tuple(spw__pickle *p, uint64_t n)
{
    spw__py *v = make(p, SPW__PY_LIST);
    if (v == NULL)
        return no_memory(p);
    if (n > 0 && top(p, n) == NULL)
        return SPW_ECORRUPT;
    for (uint64_t i = 0; i < n; i++)
        SPW_TRY(add_item(p, v, p->stack[p->stack_count - n + i]));
    p->stack_count -= n;
    return push(p, v);
}

static spw_status
collect(spw__pickle *p, spw__py_kind kind)
{
    spw__py **values = NULL, *v = make(p, kind);
    uint64_t count = 0;
    if (v == NULL)
        return no_memory(p);
    SPW_TRY(pop_mark(p, &values, &count));
    if (kind == SPW__PY_DICT && count % 2 != 0)
        return broken(p, "a key without a value");
    for (uint64_t i = 0; i < count; i++)
        SPW_TRY(add_item(p, v, values[i]));
    return push(p, v);
}

/* Adds count values, which are or were on the stack, to the one that is then its top. */
static spw_status
add_all(spw__pickle *p, spw__py **values, uint64_t count, bool pairs)
{
    spw__py *v = top(p, 1);
    if (v == NULL)
        return SPW_ECORRUPT;
    if (v->kind != SPW__PY_OBJECT && v->kind != (pairs ? SPW__PY_DICT : SPW__PY_LIST))
        return broken(p, pairs ? "keys for what is no dict" : "items for what is no list");
    if (pairs && count % 2 != 0)
        return broken(p, "a key without a value");
    for (uint64_t i = 0; i < count; i++)
        SPW_TRY(add_item(p, v, values[i]));
    return SPW_OK;
}

static spw_status
add_last(spw__pickle *p, uint64_t n, bool pairs)
{
    if (top(p, n + 1) == NULL)
        return SPW_ECORRUPT;
    p->stack_count -= n;
    return add_all(p, p->stack + p->stack_count, n, pairs);
}

static spw_status
add_marked(spw__pickle *p, bool pairs)
{
    spw__py **values = NULL;
    uint64_t count = 0;
    SPW_TRY(pop_mark(p, &values, &count));
    return add_all(p, values, count, pairs);
}

/* callable and arguments, the last values, become an object; keywords: between them and the top there are some, which are left out. */
static spw_status
call(spw__pickle *p, bool keywords)
{
    uint64_t n = keywords ? 3 : 2;
    spw__py *v = make(p, SPW__PY_OBJECT);
    if (v == NULL)
        return no_memory(p);
    if (top(p, n) == NULL)
        return SPW_ECORRUPT;
    v->callable = p->stack[p->stack_count - n];
    v->args = p->stack[p->stack_count - n + 1];
    p->stack_count -= n;
    return push(p, v);
}

static spw_status
outside(spw__pickle *p)
{
    spw__py *v = make(p, SPW__PY_OUTSIDE);
    if (v == NULL)
        return no_memory(p);
    v->args = top(p, 1);
    if (v->args == NULL)
        return SPW_ECORRUPT;
    p->stack_count--;
    return push(p, v);
}

static spw_status
build(spw__pickle *p)
{
    spw__py *state = top(p, 1), *v = top(p, 2);
    if (v == NULL)
        return SPW_ECORRUPT;
    if (v->kind == SPW__PY_OBJECT)
        v->state = state;
    p->stack_count--;
    return SPW_OK;
}

static spw_status
remember(spw__pickle *p, uint64_t i)
{
    spw__py *v = top(p, 1);
    if (v == NULL)
        return SPW_ECORRUPT;
    if (i > p->bytes) /* more than there are opcodes */
        return broken(p, "a memo's number");
    if (!spw_mem_grow((void **)&p->memo, &p->memo_bytes, (i + 1) * sizeof *p->memo, p->memo_bytes))
        return no_memory(p);
    p->memo[i] = v;
    p->memo_count++;
    return SPW_OK;
}

static spw_status
recall(spw__pickle *p, uint64_t i)
{
    if (i >= p->memo_bytes / sizeof *p->memo || p->memo[i] == NULL)
        return broken(p, "a memo that was not written");
    return push(p, p->memo[i]);
}

static spw_status
push_mark(spw__pickle *p)
{
    if (!spw_mem_grow((void **)&p->marks, &p->mark_bytes, (p->mark_count + 1) * sizeof *p->marks,
                      p->mark_count * sizeof *p->marks))
        return no_memory(p);
    p->marks[p->mark_count++] = p->stack_count;
    return SPW_OK;
}

/* ---------------------------------------------------------------- opcodes */

/* Of numbers and texts, whose argument is so many bytes, or the length of what follows. */
static spw_status
run_plain(spw__pickle *p, unsigned char op, bool *known)
{
    uint64_t n = 0;
    *known = true;
    switch (op) {
    case 'N': return push(p, make(p, SPW__PY_NONE));
    case 0x88: return push_int(p, 1, SPW__PY_BOOL);
    case 0x89: return push_int(p, 0, SPW__PY_BOOL);
    case 'K': SPW_TRY(next_uint(p, 1, &n)); return push_int(p, (int64_t)n, SPW__PY_INT);
    case 'M': SPW_TRY(next_uint(p, 2, &n)); return push_int(p, (int64_t)n, SPW__PY_INT);
    case 'J': SPW_TRY(next_uint(p, 4, &n)); return push_int(p, (int32_t)(uint32_t)n, SPW__PY_INT);
    case 0x8a: SPW_TRY(next_uint(p, 1, &n)); return push_long(p, n);
    case 0x8b: SPW_TRY(next_uint(p, 4, &n)); return push_long(p, n);
    case 'G': return push_real(p);
    case 'U':
    case 'C':
    case 0x8c: SPW_TRY(next_uint(p, 1, &n)); return push_text(p, n);
    case 'X':
    case 'T':
    case 'B': SPW_TRY(next_uint(p, 4, &n)); return push_text(p, n);
    case 0x8d:
    case 0x8e:
    case 0x96: SPW_TRY(next_uint(p, 8, &n)); return push_text(p, n);
    default: *known = false; return SPW_OK;
    }
}

static spw_status
run_memo(spw__pickle *p, unsigned char op, bool *known)
{
    uint64_t n = 0;
    *known = true;
    switch (op) {
    case 'q': SPW_TRY(next_uint(p, 1, &n)); return remember(p, n);
    case 'r': SPW_TRY(next_uint(p, 4, &n)); return remember(p, n);
    case 0x94: return remember(p, p->memo_count);
    case 'h': SPW_TRY(next_uint(p, 1, &n)); return recall(p, n);
    case 'j': SPW_TRY(next_uint(p, 4, &n)); return recall(p, n);
    default: *known = false; return SPW_OK;
    }
}

static spw_status
run_one(spw__pickle *p, unsigned char op)
{
    uint64_t n = 0;
    bool known;
    SPW_TRY(run_plain(p, op, &known));
    if (!known)
        SPW_TRY(run_memo(p, op, &known));
    if (known)
        return SPW_OK;
    switch (op) {
    case 0x80: return next_uint(p, 1, &n); /* the protocol; its opcodes say the same */
    case 0x95: return next_uint(p, 8, &n); /* a frame's length */
    case ')': return tuple(p, 0);
    case 0x85: return tuple(p, 1);
    case 0x86: return tuple(p, 2);
    case 0x87: return tuple(p, 3);
    case ']':
    case 0x8f: return push(p, make(p, SPW__PY_LIST));
    case '}': return push(p, make(p, SPW__PY_DICT));
    case 't':
    case 'l':
    case 0x91: return collect(p, SPW__PY_LIST);
    case 'd': return collect(p, SPW__PY_DICT);
    case '(': return push_mark(p);
    case 'a': return add_last(p, 1, false);
    case 's': return add_last(p, 2, true);
    case 'e':
    case 0x90: return add_marked(p, false);
    case 'u': return add_marked(p, true);
    case 'c': return read_global(p);
    case 0x93: return stack_global(p);
    case 'R':
    case 0x81: return call(p, false);
    case 0x92: return call(p, true);
    case 'b': return build(p);
    case 'Q': return outside(p);
    case '2': return above_mark(p) > 0 ? push(p, top(p, 1)) : broken(p, "a value is missing");
    case '0':
        if (above_mark(p) == 0) /* then it is a mark that goes */
            return p->mark_count > 0 ? (p->mark_count--, SPW_OK) : broken(p, "a value is missing");
        p->stack_count--;
        return SPW_OK;
    case '1': {
        spw__py **values = NULL;
        return pop_mark(p, &values, &n);
    }
    default:
        return SPW_RAISE(p->err, SPW_EUNSUPPORTED, "%s: pickle opcode 0x%02x at byte %llu is not read", p->name, op,
                         (unsigned long long)p->at - 1);
    }
}

spw_status
spw__pickle_parse(spw__pickle **out, const void *text, uint64_t bytes, const char *name, spw_error *err)
{
    spw__pickle *p = spw_mem_zalloc(sizeof *p);
    spw_status st = SPW_OK;
    *out = NULL;
    if (p == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s", name);
    p->name = name;
    p->text = text;
    p->bytes = bytes;
    p->err = err;
    while (st == SPW_OK && p->root == NULL) {
        const unsigned char *op = NULL;
        st = next_bytes(p, 1, &op);
        if (st == SPW_OK && *op != '.')
            st = run_one(p, *op);
        else if (st == SPW_OK && (p->mark_count > 0 || p->stack_count != 1))
            st = broken(p, "more than one value");
        else if (st == SPW_OK)
            p->root = p->stack[0];
    }
    spw_mem_free(p->stack);
    spw_mem_free(p->memo);
    spw_mem_free(p->marks);
    p->stack = p->memo = NULL;
    p->marks = NULL;
    if (st != SPW_OK)
        spw__pickle_free(p);
    else
        *out = p;
    return st;
}

void
spw__pickle_free(spw__pickle *p)
{
    for (block *b = p != NULL ? p->blocks : NULL, *next; b != NULL; b = next) {
        next = b->next;
        spw_mem_free(b);
    }
    spw_mem_free(p);
}

const spw__py *
spw__pickle_root(const spw__pickle *p)
{
    return p->root;
}
