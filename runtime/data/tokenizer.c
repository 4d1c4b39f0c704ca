/*
 * A tokenizer from open to close: encoding runs a text through added tokens, NFC, added tokens again, patterns and merges;
 * decoding puts the bytes of tokens together. The object never changes after open but for its list of scratches, one for
 * each thread that encodes at the same time. Reading files is left to tokenizer_json.c.
 */
#include "tokenizer_internal.h"

/* For one match; a long piece takes as many as it has bytes. A pattern that needs more than these has no end. */
enum { MATCH_STEPS = 10000000 };

/* ---------------------------------------------------------------- memory */

/* Makes *array at least want_bytes large, twice as large as it was; the first keep_bytes stay. */
spw_status
spw__tok_grow(void **array, uint64_t *have_bytes, uint64_t want_bytes, uint64_t keep_bytes, const char *what,
              spw_error *err)
{
    return spw_mem_grow(array, have_bytes, want_bytes, keep_bytes)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENOMEM, "%s (%llu bytes)", what, (unsigned long long)want_bytes);
}

static void *
pcre_take(PCRE2_SIZE bytes, void *ctx)
{
    (void)ctx;
    return spw_mem_zalloc(bytes);
}

static void
pcre_give(void *p, void *ctx)
{
    (void)ctx;
    spw_mem_free(p);
}

static void
scratch_destroy(tok_scratch *s)
{
    if (s == NULL)
        return;
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->context);
    pcre2_jit_stack_free(s->stack);
    spw_mem_free(s->cache);
    spw_mem_free(s->word);
    spw_mem_free(s->normal);
    spw_mem_free(s->points);
    spw_mem_free(s);
}

static spw_status
scratch_create(tok_scratch **out, const spw_tokenizer *t, spw_error *err)
{
    tok_scratch *s = spw_mem_zalloc(sizeof *s);
    *out = s;
    if (s != NULL) {
        s->match = pcre2_match_data_create(2, t->memory);
        s->context = pcre2_match_context_create(t->memory);
        s->stack = pcre2_jit_stack_create(32 << 10, 1 << 20, t->memory); /* NULL without JIT, which then runs without */
        s->cache = spw_mem_calloc(TOK_CACHE_ENTRIES, sizeof *s->cache);
    }
    if (s == NULL || s->match == NULL || s->context == NULL || s->cache == NULL) {
        scratch_destroy(s);
        return SPW_RAISE(err, SPW_ENOMEM, "working memory for a tokenizer");
    }
    if (s->stack != NULL)
        pcre2_jit_stack_assign(s->context, NULL, s->stack);
    return SPW_OK;
}

static spw_status
scratch_acquire(tok_scratch **out, const spw_tokenizer *shared, spw_error *err)
{
    spw_tokenizer *t = (spw_tokenizer *)(uintptr_t)shared; /* the list under its lock is all that changes */
    pthread_mutex_lock(&t->lock);
    *out = t->free_scratch;
    if (*out != NULL)
        t->free_scratch = (*out)->next;
    pthread_mutex_unlock(&t->lock);
    return *out != NULL ? SPW_OK : scratch_create(out, t, err);
}

static void
scratch_release(const spw_tokenizer *shared, tok_scratch *s)
{
    spw_tokenizer *t = (spw_tokenizer *)(uintptr_t)shared;
    pthread_mutex_lock(&t->lock);
    s->next = t->free_scratch;
    t->free_scratch = s;
    pthread_mutex_unlock(&t->lock);
}

/* ---------------------------------------------------------------- open and close */

/* Whether a text that an added token stands in may be cut inside it, whatever follows. */
static bool
has_cut(const spw_tokenizer *t, const char *text, uint64_t bytes)
{
    for (uint64_t at = 1; at < bytes; at++) {
        bool space = t->chars ? spw__tok_chars_space(text + at, bytes - at) > 0 : at + 1 == bytes && text[at] == ' ';
        if (spw__tok_may_cut(text, bytes, at) || (space && spw__tok_ends_word(text, at)))
            return true;
    }
    return false;
}

spw_status
spw_tokenizer_open(spw_tokenizer **out, const char *path, spw_error *err)
{
    spw_tokenizer *t = spw_mem_zalloc(sizeof *t);
    tok_scratch *s = NULL;
    spw_status st = SPW_OK;
    *out = NULL;
    if (t == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tokenizer");
    pthread_mutex_init(&t->lock, NULL);
    t->end = -1;
    t->memory = pcre2_general_context_create(pcre_take, pcre_give, NULL);
    if (t->memory == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "tokenizer");
    if (st == SPW_OK)
        st = spw__tok_load(t, path, err);
    if (st == SPW_OK)
        st = spw__tok_added_build(t, err);
    if (st == SPW_OK && (st = scratch_create(&s, t, err)) == SPW_OK)
        scratch_release(t, s);
    t->cuts = t->chars ? t->words : t->cuts;
    for (uint32_t i = 0; i < t->added_count; i++) {
        const tok_added *a = &t->added[i];
        if (a->lstrip || a->rstrip || has_cut(t, a->text, a->bytes))
            t->cuts = false;
    }
    if (st != SPW_OK)
        spw_tokenizer_close(t);
    else
        *out = t;
    return st;
}

void
spw_tokenizer_close(spw_tokenizer *t)
{
    if (t == NULL)
        return;
    while (t->free_scratch != NULL) {
        tok_scratch *s = t->free_scratch;
        t->free_scratch = s->next;
        scratch_destroy(s);
    }
    for (uint32_t i = 0; i < t->pattern_count; i++)
        pcre2_code_free(t->patterns[i].code);
    pcre2_general_context_free(t->memory);
    spw_mem_free(t->tokens);
    spw_mem_free(t->pool);
    spw_mem_free(t->by_text);
    spw_mem_free(t->pairs);
    spw_mem_free(t->added);
    spw_mem_free(t->raw.list);
    spw_mem_free(t->normal.list);
    spw_mem_free(t->normal_pool);
    pthread_mutex_destroy(&t->lock);
    spw_mem_free(t);
}

/* ---------------------------------------------------------------- encode */

spw_status
spw__tok_normal(const spw_tokenizer *t, tok_scratch *s, bool prefix, const char *text, uint64_t bytes, const char **out,
                uint64_t *bytes_out, spw_error *err)
{
    *out = text;
    *bytes_out = bytes;
    if (t->nfc)
        return spw__tok_nfc(s, text, bytes, out, bytes_out, err);
    return t->chars_early
               ? spw__tok_chars_form(s, prefix && t->prefix == TOK_PREFIX_ALWAYS, text, bytes, out, bytes_out, err)
               : SPW_OK;
}

/* Between added tokens that are looked for in the text as it came: its normal form, then those that are looked for after it. */
static spw_status
encode_plain(const tok_run *r, const char *text, uint64_t bytes)
{
    uint64_t search = 0, done = 0;
    tok_match m;
    SPW_TRY(spw__tok_normal(r->t, r->s, !r->rest || text != r->begin, text, bytes, &text, &bytes, r->err));
    while (spw__tok_added_next(&r->t->normal, text, bytes, r->special, &search, done, &m)) {
        if (m.begin > done)
            SPW_TRY(spw__tok_split(r, text + done, m.begin - done));
        SPW_TRY(spw_tokens_push(r->out, m.id, r->err));
        done = m.end;
    }
    return done < bytes ? spw__tok_split(r, text + done, bytes - done) : SPW_OK;
}

spw_status
spw_tokens_push_begin(spw_tokens *tokens, const spw_begin *begin, spw_error *err)
{
    for (uint32_t i = 0; i < begin->count; i++)
        SPW_TRY(spw_tokens_push(tokens, begin->ids[i], err));
    return SPW_OK;
}

static spw_status
encode_all(const tok_run *r, const char *text, uint64_t bytes)
{
    uint64_t search = 0, done = 0;
    tok_match m;
    while (spw__tok_added_next(&r->t->raw, text, bytes, r->special, &search, done, &m)) {
        if (m.begin > done)
            SPW_TRY(encode_plain(r, text + done, m.begin - done));
        SPW_TRY(spw_tokens_push(r->out, m.id, r->err));
        done = m.end;
    }
    return done < bytes ? encode_plain(r, text + done, bytes - done) : SPW_OK;
}

static spw_status
run_on(tok_run *r, spw_status (*part)(const tok_run *r, const char *text, uint64_t bytes), const char *text,
       uint64_t bytes)
{
    uint64_t before = r->out->count;
    spw_status st;
    uint64_t steps = bytes < UINT32_MAX / 16 ? MATCH_STEPS + 8 * bytes : UINT32_MAX;
    SPW_TRY(scratch_acquire(&r->s, r->t, r->err));
    pcre2_set_match_limit(r->s->context, (uint32_t)steps);
    st = part(r, text, bytes);
    scratch_release(r->t, r->s);
    if (st != SPW_OK)
        r->out->count = before;
    return st;
}

static spw_status
encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, bool rest, spw_tokens *tokens,
       spw_error *err)
{
    tok_run r = {.t = t, .out = tokens, .err = err, .special = special, .begin = text, .rest = rest};
    return run_on(&r, encode_all, text, bytes);
}

spw_status
spw__tok_stretch(const spw_tokenizer *t, const char *text, uint64_t bytes, bool first, spw_tokens *tokens,
                 spw_error *err)
{
    tok_run r = {.t = t, .out = tokens, .err = err, .begin = first ? text : NULL};
    return run_on(&r, encode_plain, text, bytes);
}

spw_status
spw_tokenizer_encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, spw_tokens *tokens,
                     spw_error *err)
{
    return encode(t, text, bytes, special, false, tokens, err);
}

spw_status
spw_tokenizer_encode_rest(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, spw_tokens *tokens,
                          spw_error *err)
{
    return encode(t, text, bytes, special, true, tokens, err);
}

spw_status
spw_tokenizer_encode_data(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
                          uint64_t *token_count, spw_error *err)
{
    spw_tokens ids = {0};
    spw_status st = encode(ctx, text, bytes, false, rest, &ids, err);
    *token_count = ids.count;
    if (ids.count > 0 && ids.count <= token_max)
        memcpy(tokens, ids.ids, ids.count * sizeof *tokens);
    spw_tokens_free(&ids);
    return st;
}

void
spw_tokens_free(spw_tokens *tokens)
{
    spw_mem_free(tokens->ids);
    *tokens = (spw_tokens){0};
}

uint64_t
spw_tokenizer_cut(const spw_tokenizer *t, const char *text, uint64_t bytes, uint64_t from)
{
    for (uint64_t at = from > 0 ? from : 1; t->cuts && at < bytes; at++) {
        if (t->chars ? text[at] == ' ' && spw__tok_ends_word(text, at) : spw__tok_may_cut(text, bytes, at))
            return at;
    }
    return bytes;
}

/* ---------------------------------------------------------------- decode and look up */

spw_status
spw_tokenizer_decode(const spw_tokenizer *t, const int32_t *ids, uint64_t count, bool special, char *text,
                     uint64_t bytes_max, uint64_t *bytes_out, spw_error *err)
{
    uint64_t used = 0;
    bool first = true;
    *bytes_out = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t skip; /* the space that encoding put before the text */
        const tok_token *k = &t->tokens[ids[i] < 0 || (uint64_t)ids[i] >= t->vocab ? 0 : ids[i]];
        if (ids[i] < 0 || (uint64_t)ids[i] >= t->vocab || k->flags == 0)
            return SPW_RAISE(err, SPW_EINVAL, "token %d, at place %llu of %llu, is not in the vocabulary of %llu of %s",
                             ids[i], (unsigned long long)i, (unsigned long long)count, (unsigned long long)t->vocab,
                             t->path);
        if ((k->flags & TOK_SPECIAL) && !special)
            continue;
        skip = first && t->prefix != TOK_PREFIX_NEVER && k->bytes > 0 && t->pool[k->offset] == ' ';
        first = first && k->bytes == 0;
        if (text != NULL) {
            if (k->bytes - skip > bytes_max - used)
                return SPW_RAISE(err, SPW_EINVAL, "%llu bytes are too few for the text of %llu tokens",
                                 (unsigned long long)bytes_max, (unsigned long long)count);
            memcpy(text + used, t->pool + k->offset + skip, k->bytes - skip);
        }
        used += k->bytes - skip;
    }
    *bytes_out = used;
    return SPW_OK;
}

uint64_t
spw_tokenizer_key(const spw_tokenizer *t)
{
    return t->key;
}

uint64_t
spw_tokenizer_vocab(const spw_tokenizer *t)
{
    return t->vocab;
}

uint64_t
spw_tokenizer_vocab_own(const spw_tokenizer *t)
{
    uint64_t count = t->vocab;
    while (count > 0 && (t->tokens[count - 1].flags == 0 || (t->tokens[count - 1].flags & TOK_ADDED)))
        count--;
    return count;
}

const char *
spw_tokenizer_text(const spw_tokenizer *t, int32_t id, uint64_t *bytes_out)
{
    *bytes_out = 0;
    if (id < 0 || (uint64_t)id >= t->vocab || t->tokens[id].flags == 0)
        return NULL;
    *bytes_out = t->tokens[id].bytes;
    return t->pool + t->tokens[id].offset;
}

int32_t
spw_tokenizer_find(const spw_tokenizer *t, const char *text, uint64_t bytes)
{
    for (uint32_t i = 0; i < t->added_count; i++) {
        if (t->added[i].bytes == bytes && memcmp(t->added[i].text, text, bytes) == 0)
            return t->added[i].id;
    }
    return spw__tok_by_text(t, text, bytes);
}

int32_t
spw_tokenizer_end(const spw_tokenizer *t)
{
    return t->end;
}

spw_begin
spw_tokenizer_begin(const spw_tokenizer *t)
{
    return t->begin;
}
