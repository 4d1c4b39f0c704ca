/*
 * Merging one piece of text: from single bytes, the pair of neighbours with the lowest rank becomes one token, the leftmost
 * of equals first, until no pair is left that merges. Short pieces do it in place, looking at every pair each time; long
 * ones with a linked list and a heap, so that a megabyte without a boundary takes n log n. Pieces that have been seen
 * lately come from a cache of one line each, direct-mapped. A scratch belongs to one thread at a time.
 */
#include "tokenizer_internal.h"

enum { SHORT_BYTES = 48 };

spw_status
spw_tokens_push(spw_tokens *tokens, int32_t id, spw_error *err)
{
    if (tokens->count == tokens->capacity) {
        uint64_t have = tokens->capacity * sizeof *tokens->ids, want = (tokens->count + 1) * sizeof *tokens->ids;
        SPW_TRY(spw__tok_grow((void **)&tokens->ids, &have, want, have, "token ids", err));
        tokens->capacity = have / sizeof *tokens->ids;
    }
    tokens->ids[tokens->count++] = id;
    return SPW_OK;
}

static inline spw_status
emit(const tok_run *r, int32_t id)
{
    return spw_tokens_push(r->out, id, r->err);
}

static inline uint64_t
pair_slot(uint64_t key, uint64_t mask)
{
    key *= 0x9e3779b97f4a7c15u;
    return (key ^ key >> 32) & mask;
}

/* What two neighbours become; NULL: they stay apart. */
static inline const tok_pair *
find_pair(const spw_tokenizer *t, uint32_t left, uint32_t right)
{
    uint64_t key = (uint64_t)left << 32 | right;
    for (uint64_t at = pair_slot(key, t->pair_mask);; at = (at + 1) & t->pair_mask) {
        if (t->pairs[at].key == key)
            return &t->pairs[at];
        if (t->pairs[at].key == UINT64_MAX)
            return NULL;
    }
}

void
spw__tok_pair_set(spw_tokenizer *t, uint32_t left, uint32_t right, uint32_t rank, int32_t id)
{
    uint64_t key = (uint64_t)left << 32 | right, at = pair_slot(key, t->pair_mask);
    while (t->pairs[at].key != UINT64_MAX && t->pairs[at].key != key)
        at = (at + 1) & t->pair_mask;
    t->pairs[at] = (tok_pair){.key = key, .rank = rank, .id = id};
}

static inline uint32_t
rank_of(const spw_tokenizer *t, uint32_t left, uint32_t right)
{
    const tok_pair *p = find_pair(t, left, right);
    return p == NULL ? UINT32_MAX : p->rank;
}

/* What merging starts from: the tokens of a text's bytes, or of its characters. ids (bytes) out; returns how many. */
static uint32_t
first_ids(const spw_tokenizer *t, const char *text, uint64_t bytes, uint32_t *ids)
{
    if (t->chars)
        return (uint32_t)spw__tok_chars_ids(t, text, bytes, ids);
    for (uint64_t i = 0; i < bytes; i++)
        ids[i] = (uint32_t)t->byte_id[(unsigned char)text[i]];
    return (uint32_t)bytes;
}

/* ids (count) in: the first tokens; out: the result. Returns how many. */
static uint32_t
merge_short(const spw_tokenizer *t, uint32_t *ids, uint32_t count)
{
    uint32_t rank[SHORT_BYTES]; /* of the pair that starts here */
    for (uint32_t i = 0; i + 1 < count; i++)
        rank[i] = rank_of(t, ids[i], ids[i + 1]);
    rank[count - 1] = UINT32_MAX;
    while (count > 1) {
        uint32_t best = UINT32_MAX, at = 0;
        for (uint32_t i = 0; i + 1 < count; i++) {
            if (rank[i] < best) {
                best = rank[i];
                at = i;
            }
        }
        if (best == UINT32_MAX)
            break;
        ids[at] = (uint32_t)find_pair(t, ids[at], ids[at + 1])->id;
        count--;
        for (uint32_t i = at + 1; i < count; i++) {
            ids[i] = ids[i + 1];
            rank[i] = rank[i + 1];
        }
        if (at > 0)
            rank[at - 1] = rank_of(t, ids[at - 1], ids[at]);
        if (at + 1 < count)
            rank[at] = rank_of(t, ids[at], ids[at + 1]);
    }
    return count;
}

/* A binary heap of rank << 32 | position: the least first, so the leftmost of equal ranks. */
static void
heap_push(uint64_t *heap, uint64_t *count, uint64_t item)
{
    uint64_t at = (*count)++;
    for (; at > 0 && heap[(at - 1) / 2] > item; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = item;
}

static uint64_t
heap_pop(uint64_t *heap, uint64_t *count)
{
    uint64_t top = heap[0], item = heap[--*count], at = 0, child;
    while ((child = 2 * at + 1) < *count) {
        if (child + 1 < *count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= item)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
    return top;
}

static spw_status
merge_long(const tok_run *r, const char *text, uint64_t bytes)
{
    const spw_tokenizer *t = r->t;
    uint32_t *ids, *rank, *next, *before, n;
    uint64_t *heap, held = 0;
    if (bytes >= UINT32_MAX / 2)
        return SPW_RAISE(r->err, SPW_EUNSUPPORTED, "a piece of %llu bytes without a boundary",
                         (unsigned long long)bytes);
    /* A merge takes one entry off the heap and puts at most two on it, so there are never more than 2 n. */
    SPW_TRY(spw__tok_grow((void **)&r->s->word, &r->s->word_bytes, bytes * (2 * sizeof *heap + 4 * sizeof *ids), 0,
                          "a long piece of text", r->err));
    heap = (uint64_t *)(void *)r->s->word;
    ids = (uint32_t *)(heap + 2 * bytes);
    rank = ids + bytes;
    next = rank + bytes;
    before = next + bytes;
    n = first_ids(t, text, bytes, ids);
    for (uint32_t i = 0; i < n; i++) {
        next[i] = i + 1; /* n: the end */
        before[i] = i - 1;
    }
    rank[n - 1] = UINT32_MAX;
    for (uint32_t i = 0; i + 1 < n; i++) {
        rank[i] = rank_of(t, ids[i], ids[i + 1]);
        if (rank[i] != UINT32_MAX)
            heap_push(heap, &held, (uint64_t)rank[i] << 32 | i);
    }
    while (held > 0) {
        uint64_t top = heap_pop(heap, &held);
        uint32_t at = (uint32_t)top, gone, prior;
        if (rank[at] != top >> 32) /* the pair has changed since */
            continue;
        gone = next[at];
        ids[at] = (uint32_t)find_pair(t, ids[at], ids[gone])->id;
        next[at] = next[gone];
        rank[gone] = UINT32_MAX;
        rank[at] = UINT32_MAX;
        if (next[at] < n) {
            before[next[at]] = at;
            rank[at] = rank_of(t, ids[at], ids[next[at]]);
            if (rank[at] != UINT32_MAX)
                heap_push(heap, &held, (uint64_t)rank[at] << 32 | at);
        }
        if (at > 0) {
            prior = before[at];
            rank[prior] = rank_of(t, ids[prior], ids[at]);
            if (rank[prior] != UINT32_MAX)
                heap_push(heap, &held, (uint64_t)rank[prior] << 32 | prior);
        }
    }
    for (uint32_t i = 0; i < n; i = next[i])
        SPW_TRY(emit(r, (int32_t)ids[i]));
    return SPW_OK;
}

static spw_status
merge(const tok_run *r, const char *text, uint64_t bytes)
{
    uint32_t ids[SHORT_BYTES], count;
    if (bytes > SHORT_BYTES)
        return merge_long(r, text, bytes);
    count = merge_short(r->t, ids, first_ids(r->t, text, bytes, ids));
    for (uint32_t i = 0; i < count; i++)
        SPW_TRY(emit(r, (int32_t)ids[i]));
    return SPW_OK;
}

spw_status
spw__tok_word(const tok_run *r, const char *text, uint64_t bytes)
{
    uint64_t first = r->out->count, made;
    tok_cached *c = NULL;
    int32_t whole;
    if (bytes == 1 && !r->t->chars)
        return emit(r, r->t->byte_id[(unsigned char)text[0]]);
    if (bytes <= TOK_CACHED_BYTES) {
        c = &r->s->cache[spw_checksum(text, bytes) % TOK_CACHE_ENTRIES];
        if (c->bytes == bytes && memcmp(c->text, text, bytes) == 0) {
            for (uint32_t i = 0; i < c->ids; i++)
                SPW_TRY(emit(r, c->id[i]));
            return SPW_OK;
        }
    }
    if (r->t->ignore_merges && (whole = spw__tok_by_text(r->t, text, bytes)) >= 0)
        SPW_TRY(emit(r, whole));
    else
        SPW_TRY(merge(r, text, bytes));
    made = r->out->count - first;
    if (c != NULL && made <= TOK_CACHED_IDS) {
        c->bytes = (uint8_t)bytes;
        c->ids = (uint8_t)made;
        memcpy(c->text, text, bytes);
        memcpy(c->id, r->out->ids + first, made * sizeof *c->id);
    }
    return SPW_OK;
}
