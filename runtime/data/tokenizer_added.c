/*
 * Added tokens in text: leftmost first, of those that start at one place the longest. The tokens are sorted by their bytes;
 * walking down the text narrows the range that still fits, byte by byte. Pure after open.
 */
#include "tokenizer_internal.h"
#include <stdlib.h>

static int
by_bytes(const void *a, const void *b)
{
    const tok_added *x = a, *y = b;
    uint64_t shared = x->bytes < y->bytes ? x->bytes : y->bytes;
    int order = memcmp(x->text, y->text, shared);
    return order != 0 ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static spw_status
build_set(tok_added_set *set, const tok_added *all, uint32_t count, bool normalized, spw_error *err)
{
    if (count == 0)
        return SPW_OK;
    set->list = spw_mem_calloc(count, sizeof *set->list);
    if (set->list == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%u added tokens", count);
    for (uint32_t i = 0; i < count; i++) {
        if (all[i].normalized != normalized || all[i].bytes == 0)
            continue;
        set->list[set->count++] = all[i];
        set->starts[(unsigned char)all[i].text[0]] = true;
    }
    qsort(set->list, set->count, sizeof *set->list, by_bytes);
    return SPW_OK;
}

spw_status
spw__tok_added_build(spw_tokenizer *t, spw_error *err)
{
    tok_scratch s = {0};
    uint64_t room = 0, used = 0;
    spw_status st;
    if (t->added_count > 0)
        qsort(t->added, t->added_count, sizeof *t->added, by_bytes);
    for (uint32_t i = 1; i < t->added_count; i++) {
        if (by_bytes(&t->added[i - 1], &t->added[i]) == 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens: \"%.*s\" is there twice, as %d and %d", t->path,
                             t->added[i].bytes < 100 ? (int)t->added[i].bytes : 100, t->added[i].text,
                             t->added[i - 1].id, t->added[i].id);
    }
    st = build_set(&t->raw, t->added, t->added_count, false, err);
    t->normal.signs = t->chars_early;
    if (st == SPW_OK)
        st = build_set(&t->normal, t->added, t->added_count, true, err);
    if (st != SPW_OK || !(t->nfc || t->chars_early) || t->normal.count == 0)
        return st;
    for (uint32_t i = 0; i < t->normal.count; i++)
        room += 3 * t->normal.list[i].bytes; /* the most that NFC makes of UTF-8 */
    if ((t->normal_pool = spw_mem_zalloc(room)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "added tokens");
    memset(t->normal.starts, 0, sizeof t->normal.starts);
    for (uint32_t i = 0; i < t->normal.count; i++) {
        tok_added *a = &t->normal.list[i];
        st = spw__tok_normal(t, &s, true, a->text, a->bytes, &a->text, &a->bytes, err);
        if (st == SPW_OK && a->bytes > room - used)
            st = SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: added_tokens: the normal form of token %d is too long", t->path,
                           a->id);
        if (st != SPW_OK)
            break;
        memcpy(t->normal_pool + used, a->text, a->bytes);
        a->text = t->normal_pool + used;
        used += a->bytes;
        t->normal.starts[(unsigned char)a->text[0]] = true;
    }
    if (st == SPW_OK)
        qsort(t->normal.list, t->normal.count, sizeof *t->normal.list, by_bytes);
    spw_mem_free(s.normal);
    spw_mem_free(s.points);
    return st;
}

/* The first of list [low, high), which agree up to depth, whose byte there is at least `byte`. */
static uint32_t
first_from(const tok_added_set *set, uint32_t low, uint32_t high, uint64_t depth, unsigned byte)
{
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((unsigned char)set->list[middle].text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest token that stands at the start of text, or NULL. */
static const tok_added *
longest(const tok_added_set *set, const char *text, uint64_t bytes)
{
    const tok_added *found = NULL;
    uint32_t low = 0, high = set->count;
    for (uint64_t depth = 0; low < high; depth++) {
        unsigned byte = depth < bytes ? (unsigned char)text[depth] : 0;
        while (low < high && set->list[low].bytes == depth) /* the shortest of the range come first */
            found = &set->list[low++];
        if (depth == bytes)
            break;
        low = first_from(set, low, high, depth, byte);
        high = first_from(set, low, high, depth, byte + 1);
    }
    return found;
}

const tok_added *
spw__tok_added_find(const spw_tokenizer *t, const char *spelled)
{
    uint64_t bytes = strlen(spelled);
    for (uint32_t i = 0; i < t->added_count; i++) {
        if (t->added[i].bytes == bytes && memcmp(t->added[i].text, spelled, bytes) == 0)
            return &t->added[i];
    }
    return NULL;
}

uint64_t
spw__tok_space_before(const char *text, uint64_t floor, uint64_t end, bool signs)
{
    while (end > floor) {
        uint64_t at = end - 1;
        uint32_t cp;
        while (at > floor && end - at < 4 && ((unsigned char)text[at] & 0xc0) == 0x80)
            at--;
        if (spw__utf8_next(text + at, end - at, &cp) != end - at || !spw__is_space(cp) || (signs && cp == ' '))
            break;
        end = at;
    }
    return end;
}

uint64_t
spw__tok_space_after(const char *text, uint64_t at, uint64_t bytes, bool signs)
{
    while (at < bytes) {
        uint32_t cp, length = spw__utf8_next(text + at, bytes - at, &cp);
        if (length == 0 || !spw__is_space(cp) || (signs && cp == ' '))
            break;
        at += length;
    }
    return at;
}

/*
 * The next token at or after *search, which moves behind it. What stands before `floor` has been used up: white space is
 * taken from there on only, and a token with lstrip that lies before it, white space itself, is none. A special token that is not
 * wanted still hides what overlaps with it.
 */
bool
spw__tok_added_next(const tok_added_set *set, const char *text, uint64_t bytes, bool special, uint64_t *search,
                    uint64_t floor, tok_match *out)
{
    if (set->count == 0)
        return false;
    for (uint64_t at = *search; at < bytes; at++) {
        const tok_added *a;
        uint64_t end;
        if (!set->starts[(unsigned char)text[at]] || (a = longest(set, text + at, bytes - at)) == NULL)
            continue;
        if (a->special && !special) {
            at += a->bytes - 1;
            continue;
        }
        end = a->rstrip ? spw__tok_space_after(text, at + a->bytes, bytes, set->signs) : at + a->bytes;
        if (a->lstrip && floor >= end) {
            at += a->bytes - 1;
            continue;
        }
        *search = at + a->bytes;
        out->id = a->id;
        out->begin = a->lstrip ? spw__tok_space_before(text, floor < at ? floor : at, at, set->signs) : at;
        out->end = end;
        return true;
    }
    return false;
}
