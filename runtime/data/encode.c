/*
 * Text and JSON lines as a file of tokens in a cache folder. Without one, finding the n-th window of JSON lines would need an
 * index in memory and parsing at every use; with it, all formats are rows of tokens that are read by window.
 *
 *   0  "SPWTOKEN" | 8  u32 version 2 | 12  u32 bytes per token, 2 or 4 | 16  u64 key | 24  u64 tokens | 32  u64 documents
 *   40  u64 windows in which no token has a target | 48  u64 documents longer than a window | 56  u64 targets, 0: not counted | tokens: the two
 *   top bits are CACHE_FIRST and CACHE_NO_LOSS. Of pairs of answers 32 counts pairs, and 48 those that were left out.
 *
 * Two bytes hold vocabularies up to 16384. The key says what the tokens were made from and how: the file's path, size and
 * time, the fields, pairs, the encoder, the layout of conversations, the token that ends texts, and windows where they are laid out or
 * counted; the file is named by it. It is written without a name, or
 * beside its place where the file system knows no such files, and put there when complete: a kill leaves nothing that looks like a
 * cache, or nothing at all, and of runs that make it at the same time the first one's stays. Nothing deletes caches; anybody may.
 */
#include "data_internal.h"
#include "spw_files.h"
#include "tokenizer_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    VERSION = 2,
    HEADER_BYTES = 64,
    NARROW_VOCAB = 16384,
    PIECE_BYTES = 1 << 20,
    LINE_BYTES_MAX = 64 << 20,
    READ_BYTES = 64 << 10,
    OUT_TOKENS = 4096
};

/* One file on its way to tokens. */
typedef struct encoding {
    const spw_data_options *o;
    const char *path; /* that is read */
    int fd, out;
    char *part; /* the file that is written: a name for messages, and its own unless it is nameless */
    bool nameless;
    bool wide, of_tokens; /* of_tokens: lines hold tokens */
    uint64_t vocab;       /* ids are below it */
    uint64_t tokens, documents, line, line_offset;
    uint64_t targets_seen;
    uint64_t untargeted, cut; /* windows without a target, and documents that one does not hold */
    bool targeted;            /* the window of the next word has a target */
    uint64_t longer, alike;   /* pairs left out: longer than a window, without anything to learn */
    uint64_t apart;           /* pairs whose answers are to different prompts */
    bool prompted, bare;      /* a line of pairs has had a prompt; one had none, and fields that may have been meant */
    /* Bytes that were read and not used yet: [at, have) of text, which begins at `offset` of the file. */
    char *text;
    uint64_t room, at, have, offset, size;
    /* The encoder's tokens. */
    int32_t *ids;
    uint64_t id_room;
    spw_tokens turns, targets;          /* of a conversation, or of both parts of a pair */
    spw_tokens listed, labels, lengths; /* of a field that holds tokens: lengths of its documents */
    unsigned char buffer[OUT_TOKENS * 4];
    uint64_t buffered;
    data_packer *packer; /* of windows that hold whole documents; NULL: tokens follow each other */
} encoding;

/* ---------------------------------------------------------------- writing */

static spw_status
flush(encoding *e, spw_error *err)
{
    for (uint64_t done = 0; done < e->buffered;) {
        ssize_t n = SPW_CALL(EIO, write(e->out, e->buffer + done, e->buffered - done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return SPW_RAISE_SYS(err, errno, "data: write tokens of %s to %s", e->path, e->part);
        done += (uint64_t)n;
    }
    e->buffered = 0;
    return SPW_OK;
}

/* Puts in front of an error where it is. */
static spw_status
at_line(const encoding *e, spw_status st, spw_error *err)
{
    spw_error_wrap(err, "data: %s: line %llu (byte %llu)", e->path, (unsigned long long)e->line,
                   (unsigned long long)e->line_offset);
    return st;
}

static spw_status
bad_token(const encoding *e, int64_t id, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: line %llu (byte %llu): token %lld is outside the vocabulary of %llu",
                     e->path, (unsigned long long)e->line, (unsigned long long)e->line_offset, (long long)id,
                     (unsigned long long)e->vocab);
}

/* Counts windows: word i is a target of the window of word i - 1, unless it has no loss. */
static void
see_word(encoding *e, uint64_t i, uint32_t word)
{
    uint32_t flags = word >> (e->wide ? 30 : 14);
    bool first = e->o->documents != SPW_DOCUMENTS_PACKED && (flags & CACHE_FIRST) != 0;
    if (i == 0)
        return;
    if ((flags & CACHE_NO_LOSS) == 0 && !first) {
        e->targets_seen++;
        e->targeted = true;
    }
    if (i % e->o->seq_length == 0) {
        e->untargeted += !e->targeted;
        e->targeted = false;
    }
}

/* As data_pack_options.emit takes it. */
static spw_status
put_words(void *ctx, const uint32_t *words, uint64_t count, spw_error *err)
{
    encoding *e = ctx;
    uint32_t width = e->wide ? 4 : 2;
    for (uint64_t i = 0; i < count; i++) {
        if (e->buffered + width > sizeof e->buffer)
            SPW_TRY(flush(e, err));
        see_word(e, e->tokens + i, words[i]);
        spw_put_le(e->buffer + e->buffered, words[i], width);
        e->buffered += width;
    }
    e->tokens += count;
    return SPW_OK;
}

static uint32_t
word_of(const encoding *e, int64_t id, uint32_t flags)
{
    return (uint32_t)id | flags << (e->wide ? 30 : 14);
}

static spw_status
put_token(encoding *e, int64_t id, uint32_t flags, spw_error *err)
{
    uint32_t word = word_of(e, id, flags);
    if (id < 0 || (uint64_t)id >= e->vocab)
        return bad_token(e, id, err);
    return e->packer != NULL ? spw__data_pack_put(e->packer, word, err) : put_words(e, &word, 1, err);
}

/* A text's token: of a pair it waits for the others. */
static spw_status
take_token(encoding *e, int32_t id, uint32_t flags, spw_error *err)
{
    if (!e->o->pairs)
        return put_token(e, id, flags, err);
    SPW_TRY(spw_tokens_push(&e->turns, id, err));
    return spw_tokens_push(&e->targets, (flags & CACHE_NO_LOSS) != 0 ? -1 : id, err);
}

/* One document, part by part: bytes of text as tokens, the first of all marked when *begun is false. */
static spw_status
put_text(encoding *e, const char *text, uint64_t bytes, bool rest, uint32_t flags, bool *begun, spw_error *err)
{
    uint64_t count = bytes;
    if (e->o->encode != NULL) {
        for (bool again = true; again;) {
            spw_status st = e->o->encode(e->o->encode_ctx, text, bytes, rest, e->ids, e->id_room, &count, err);
            if (st != SPW_OK)
                return at_line(e, st, err);
            again = count > e->id_room;
            if (again) {
                uint64_t room = count + count / 2 + OUT_TOKENS; /* so that few texts are encoded twice */
                spw_mem_free(e->ids);
                e->id_room = 0;
                e->ids = spw_mem_calloc(room, sizeof *e->ids);
                if (e->ids == NULL)
                    return SPW_RAISE(err, SPW_ENOMEM, "%llu tokens of %s", (unsigned long long)room, e->path);
                e->id_room = room;
            }
        }
    }
    for (uint32_t i = 0, n = count > 0 && !*begun ? e->o->begin_of_text.count : 0; i < n; i++) {
        SPW_TRY(take_token(e, e->o->begin_of_text.ids[i], flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    for (uint64_t i = 0; i < count; i++) {
        SPW_TRY(take_token(e, e->o->encode != NULL ? e->ids[i] : (unsigned char)text[i],
                           flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    return SPW_OK;
}

/* What ends a text. */
static spw_status
put_end(encoding *e, spw_error *err)
{
    if (e->of_tokens)
        return SPW_OK;
    if (e->o->end_of_text_set)
        return take_token(e, e->o->end_of_text, 0, err);
    return e->o->encode == NULL ? take_token(e, '\n', 0, err) : SPW_OK;
}

static spw_status
end_document(encoding *e, bool begun, spw_error *err)
{
    if (!begun)
        return SPW_OK; /* nothing was in it */
    e->documents++;
    SPW_TRY(put_end(e, err));
    return e->packer != NULL ? spw__data_pack_end(e->packer, err) : SPW_OK;
}

/* ---------------------------------------------------------------- reading */

/* Makes room for more text behind what is there, and reads some; *have stays where the file ends. */
static spw_status
read_more(encoding *e, spw_error *err)
{
    ssize_t n;
    if (e->at > 0) {
        memmove(e->text, e->text + e->at, e->have - e->at);
        e->offset += e->at;
        e->have -= e->at;
        e->at = 0;
    }
    if (e->have + READ_BYTES > e->room) {
        uint64_t room = e->room * 2 + READ_BYTES;
        char *text = spw_mem_zalloc(room);
        if (text == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "%llu bytes for a line of %s", (unsigned long long)room, e->path);
        if (e->have > 0)
            memcpy(text, e->text, e->have);
        spw_mem_free(e->text);
        e->text = text;
        e->room = room;
    }
    do {
        n = SPW_CALL(EIO, read(e->fd, e->text + e->have, READ_BYTES));
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return SPW_RAISE_SYS(err, errno, "data: read %s at byte %llu", e->path,
                             (unsigned long long)(e->offset + e->have));
    e->have += (uint64_t)n;
    return SPW_OK;
}

/* Tokens that a line holds, as they are. */
static spw_status
put_ids(encoding *e, const spw_data_line *line, const char *name, uint32_t flags, bool *begun, spw_error *err)
{
    spw_status st;
    e->listed.count = e->labels.count = 0;
    st = spw_data_line_tokens(line, name, NULL, &e->listed, &e->labels, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t i = 0; i < e->listed.count; i++) {
        SPW_TRY(take_token(e, e->listed.ids[i], flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    return SPW_OK;
}

/* Those of text_field, of which labels beside them say which have loss, and which of them begin another document. */
static spw_status
put_documents(encoding *e, const spw_data_line *line, const char *name, bool *begun, spw_error *err)
{
    const char *labels = e->o->labels_field != NULL && e->o->labels_field[0] != '\0' ? e->o->labels_field : "labels";
    uint64_t i = 0, end = 0;
    spw_status st;
    e->listed.count = e->labels.count = e->lengths.count = 0;
    st = spw_data_line_tokens(line, name, labels, &e->listed, &e->labels, err);
    if (st == SPW_OK)
        st = spw_data_line_lengths(line, e->listed.count, &e->lengths, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t k = 0; k < e->lengths.count; k++) {
        if (k > 0) {
            SPW_TRY(end_document(e, *begun, err));
            *begun = false;
        }
        for (end += (uint64_t)e->lengths.ids[k]; i < end; i++) {
            SPW_TRY(put_token(e, e->listed.ids[i],
                              (*begun ? 0 : CACHE_FIRST) | (e->labels.ids[i] < 0 ? CACHE_NO_LOSS : 0), err));
            *begun = true;
        }
    }
    return SPW_OK;
}

static spw_status
put_field(encoding *e, spw_data_line *line, const char *name, uint32_t flags, bool *begun, spw_error *err)
{
    const char *text;
    uint64_t bytes;
    spw_status st;
    if (e->of_tokens)
        return put_ids(e, line, name, flags, begun, err);
    st = spw_data_line_text(line, name, &text, &bytes, err);
    if (st == SPW_OK)
        return put_text(e, text, bytes, false, flags, begun, err);
    return at_line(e, st, err);
}

static const char *
text_field(const spw_data_options *o)
{
    return o->text_field != NULL && o->text_field[0] != '\0' ? o->text_field : "text";
}

static spw_status
put_conversation(encoding *e, const spw_data_line *line, spw_error *err)
{
    spw_status st;
    e->turns.count = e->targets.count = 0;
    st = spw_chat_encode(e->o->chat, line, e->o->messages_field, &e->turns, &e->targets, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t i = 0; st == SPW_OK && i < e->turns.count; i++)
        st = put_token(e, e->turns.ids[i], (i == 0 ? CACHE_FIRST : 0) | (e->targets.ids[i] < 0 ? CACHE_NO_LOSS : 0),
                       err);
    e->documents += e->turns.count > 0;
    return st == SPW_OK && e->packer != NULL ? spw__data_pack_end(e->packer, err) : st;
}

/* One of a pair's parts, behind what is there. */
static spw_status
take_answer(encoding *e, spw_data_line *line, const data_pair *p, const char *answer, spw_error *err)
{
    bool begun = false;
    if (p->talks) {
        spw_status st =
            spw_chat_encode_answer(e->o->chat, line, p->prompt, answer, p->shared, &e->turns, &e->targets, err);
        return st == SPW_OK ? SPW_OK : at_line(e, st, err);
    }
    if (p->prompt != NULL)
        SPW_TRY(put_field(e, line, p->prompt, CACHE_NO_LOSS, &begun, err));
    SPW_TRY(put_field(e, line, answer, 0, &begun, err));
    return begun ? put_end(e, err) : SPW_OK;
}

/* Two documents that stay together: to the packer they are one. */
static spw_status
put_pair(encoding *e, spw_data_line *line, spw_error *err)
{
    data_pair p;
    uint64_t middle;
    spw_status st = spw__data_pair_find(&p, line, e->o, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    e->turns.count = e->targets.count = 0;
    SPW_TRY(take_answer(e, line, &p, p.answers[0], err));
    middle = e->turns.count;
    SPW_TRY(take_answer(e, line, &p, p.answers[1], err));
    if (!p.talks && p.prompt == NULL)
        spw__data_pair_hide(&e->turns, &e->targets, middle);
    e->prompted = e->prompted || p.prompted;
    e->bare = e->bare || p.bare;
    if (!spw__data_pair_differs(&e->turns, &e->targets, middle)) {
        e->alike++;
        return SPW_OK;
    }
    if (e->turns.count > e->o->seq_length) {
        e->longer++;
        return SPW_OK;
    }
    e->documents++;
    e->apart += p.apart;
    for (uint64_t i = 0; i < e->turns.count; i++)
        SPW_TRY(put_token(e, e->turns.ids[i],
                          (i == 0 || i == middle ? CACHE_FIRST : 0) | (e->targets.ids[i] < 0 ? CACHE_NO_LOSS : 0),
                          err));
    return spw__data_pack_end(e->packer, err);
}

static spw_status
put_line(encoding *e, const char *text, uint64_t bytes, spw_error *err)
{
    const char *prompt = e->o->prompt_field, *field = text_field(e->o);
    spw_data_line *line;
    bool begun = false;
    spw_status st = spw_data_line_open(&line, text, bytes, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    if (line == NULL)
        return SPW_OK;
    if (e->o->pairs) {
        st = put_pair(e, line, err);
        spw_data_line_close(line);
        return st;
    }
    if (e->o->chat != NULL && spw_chat_is_in(line, e->o->messages_field)) {
        st = put_conversation(e, line, err);
        spw_data_line_close(line);
        return st;
    }
    if (prompt != NULL && prompt[0] != '\0')
        st = put_field(e, line, prompt, CACHE_NO_LOSS, &begun, err);
    if (st == SPW_OK)
        st = e->of_tokens ? put_documents(e, line, field, &begun, err) : put_field(e, line, field, 0, &begun, err);
    if (st == SPW_OK)
        st = end_document(e, begun, err);
    spw_data_line_close(line);
    return st;
}

static spw_status
encode_lines(encoding *e, spw_error *err)
{
    uint64_t seen = 0; /* of [at, have): no line end in these */
    bool more = true;
    while (more || e->at < e->have) {
        char *end = e->at + seen < e->have ? memchr(e->text + e->at + seen, '\n', e->have - e->at - seen) : NULL;
        uint64_t before = e->offset + e->have;
        e->line_offset = e->offset + e->at;
        if (end == NULL && more) {
            seen = e->have - e->at;
            if (seen > LINE_BYTES_MAX)
                return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s: line %llu (byte %llu) has more than %d MiB", e->path,
                                 (unsigned long long)e->line + 1, (unsigned long long)e->line_offset,
                                 LINE_BYTES_MAX >> 20);
            SPW_TRY(read_more(e, err));
            more = e->offset + e->have > before;
            continue;
        }
        e->line++;
        {
            uint64_t bytes = end != NULL ? (uint64_t)(end - e->text) - e->at : e->have - e->at;
            SPW_TRY(put_line(e, e->text + e->at, bytes, err));
            e->at += bytes + (end != NULL);
        }
        seen = 0;
    }
    return SPW_OK;
}

/* Where to cut text of n bytes so that no pre-tokenizer would have joined both sides; see spw_data_encode_fn. Tokens of several
 * words have no line's end in them. */
static uint64_t
cut(const char *text, uint64_t n)
{
    uint64_t word = 0, line = 0;
    for (uint64_t i = n - 1; i > 0; i--) {
        bool may = spw__tok_may_cut(text, n, i);
        if (may && text[i] != ' ')
            return i;
        word = may && word == 0 ? i : word;
        line = line == 0 && text[i] == '\n' ? i : line;
    }
    if (word > 0 || line > 0)
        return word > 0 ? word : line;
    for (uint64_t i = n - 1; i + 4 > n && i > 0; i--) { /* no lines: not inside a character */
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return i;
    }
    return n;
}

static spw_status
encode_text(encoding *e, spw_error *err)
{
    bool begun = false, more = true;
    e->line = 1;
    while (more || e->at < e->have) {
        uint64_t before = e->offset + e->have, n;
        if (more && e->have - e->at < PIECE_BYTES) {
            SPW_TRY(read_more(e, err));
            more = e->offset + e->have > before;
            continue;
        }
        n = e->have - e->at;
        if (more || n > PIECE_BYTES)
            n = cut(e->text + e->at, PIECE_BYTES);
        e->line_offset = e->offset + e->at;
        SPW_TRY(put_text(e, e->text + e->at, n, begun, 0, &begun, err));
        for (uint64_t i = 0; i < n; i++)
            e->line += e->text[e->at + i] == '\n';
        e->at += n;
    }
    return end_document(e, begun, err);
}

/* ---------------------------------------------------------------- the cache */

static spw_status
cache_folder(const spw_data_options *o, char folder[PATH_MAX], spw_error *err)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    spw_status st;
    int n = 0;
    if (o->cache_dir != NULL && o->cache_dir[0] != '\0')
        n = snprintf(folder, PATH_MAX, "%s", o->cache_dir);
    else if (xdg != NULL && xdg[0] == '/')
        n = snprintf(folder, PATH_MAX, "%s/spillway/tokens", xdg);
    else if (home != NULL && home[0] == '/')
        n = snprintf(folder, PATH_MAX, "%s/.cache/spillway/tokens", home);
    if (n <= 0)
        return SPW_RAISE(
            err, SPW_EINVAL,
            "data.cache_dir is needed for tokens of text and JSON lines: neither $XDG_CACHE_HOME nor $HOME "
            "is an absolute path");
    if (n >= PATH_MAX - 64)
        return SPW_RAISE(err, SPW_EINVAL, "data.cache_dir is longer than %d bytes", PATH_MAX - 65);
    st = spw_dir_make(folder, err);
    if (st != SPW_OK)
        spw_error_wrap(err, o->cache_dir != NULL && o->cache_dir[0] != '\0'
                                ? "data.cache_dir"
                                : "data.cache_dir, which is below $XDG_CACHE_HOME or $HOME where nothing says it");
    return st;
}

static uint64_t
more(uint64_t sum, const char *text)
{
    return spw_checksum_more(sum, text, strlen(text) + 1);
}

uint64_t
spw__data_chat_key(const spw_data_options *o)
{
    return more(spw_chat_key(o->chat), o->messages_field != NULL ? o->messages_field : "");
}

uint64_t
spw_data_encode_key(const spw_data_options *o)
{
    const spw_begin *b = &o->begin_of_text;
    return b->count > 0 ? spw_checksum_more(o->encode_key, b->ids, b->count * sizeof b->ids[0]) : o->encode_key;
}

/* Whether tokens of f may have no loss, so that windows are worth counting. */
static bool
hides_targets(const data_file *f, const spw_data_options *o)
{
    return f->format == SPW_DATA_JSONL &&
           (f->of_tokens || o->pairs || o->chat != NULL || (o->prompt_field != NULL && o->prompt_field[0] != '\0'));
}

static uint64_t
key_of(const data_file *f, const struct stat *info, const spw_data_options *o, bool wide)
{
    const uint64_t numbers[] = {VERSION,
                                (uint64_t)info->st_size,
                                (uint64_t)info->st_mtim.tv_sec,
                                (uint64_t)info->st_mtim.tv_nsec,
                                (uint64_t)f->format,
                                o->encode != NULL,
                                o->encode != NULL || o->begin_of_text.count > 0 ? spw_data_encode_key(o) : 0,
                                o->end_of_text_set ? (uint64_t)o->end_of_text : UINT64_MAX,
                                wide};
    char *real = realpath(f->path, NULL);
    uint64_t sum = spw_checksum_more(0, numbers, sizeof numbers);
    sum = more(sum, real != NULL ? real : f->path);
    free(real);
    if (f->format == SPW_DATA_JSONL) {
        if (o->pairs) {
            sum = spw__data_pair_key(o, sum);
        } else {
            sum = more(sum, text_field(o));
            sum = more(sum, o->prompt_field != NULL ? o->prompt_field : "");
        }
        if (f->of_tokens)
            sum = more(more(sum, "documents of tokens"), o->labels_field != NULL ? o->labels_field : "");
        if (o->chat != NULL) {
            const uint64_t chat = spw__data_chat_key(o);
            sum = spw_checksum_more(sum, &chat, sizeof chat);
        }
    }
    if (o->documents == SPW_DOCUMENTS_WHOLE || hides_targets(f, o)) {
        const uint64_t windows[] = {o->documents, o->seq_length};
        sum = spw_checksum_more(sum, windows, sizeof windows);
    }
    return sum;
}

/* Takes an open cache file if it is what f needs. SPW_ECORRUPT: it is something else; other errors are of reading it. */
static spw_status
accept(data_file *f, const spw_data_options *o, uint64_t key, spw_error *err)
{
    unsigned char h[HEADER_BYTES];
    struct stat info;
    uint64_t width = f->element == E_CACHE32 ? 4 : 2, tokens;
    if (fstat(f->fd, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->store);
    SPW_TRY(spw__data_read(f->fd, f->store, 0, h, sizeof h, err));
    tokens = spw_get_le(h + 24, 8);
    if (memcmp(h, "SPWTOKEN", 8) != 0 || spw_get_le(h + 8, 4) != VERSION || spw_get_le(h + 12, 4) != width ||
        spw_get_le(h + 16, 8) != key || tokens > (uint64_t)INT64_MAX / 8 ||
        (uint64_t)info.st_size != HEADER_BYTES + tokens * width)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s changed while it was written", f->store);
    f->begin = HEADER_BYTES;
    f->tokens = tokens;
    f->targets = hides_targets(f, o) || o->documents == SPW_DOCUMENTS_WHOLE ? spw_get_le(h + 56, 8) : 0;
    f->untargeted = hides_targets(f, o) ? spw_get_le(h + 40, 8) : 0; /* else it may be other windows' */
    f->cut = o->documents == SPW_DOCUMENTS_WHOLE ? spw_get_le(h + 48, 8) : 0;
    f->pairs = o->pairs ? spw_get_le(h + 32, 8) : 0;
    return SPW_OK;
}

static spw_status
write_header(encoding *e, uint64_t key, spw_error *err)
{
    unsigned char h[HEADER_BYTES] = "SPWTOKEN";
    spw_put_le(h + 8, VERSION, 4);
    spw_put_le(h + 12, e->wide ? 4 : 2, 4);
    spw_put_le(h + 16, key, 8);
    spw_put_le(h + 24, e->tokens, 8);
    spw_put_le(h + 32, e->documents, 8);
    spw_put_le(h + 40, e->untargeted, 8);
    spw_put_le(h + 48, e->cut, 8);
    spw_put_le(h + 56, e->targets_seen, 8);
    if (SPW_CALL(EIO, pwrite(e->out, h, sizeof h, 0)) != (ssize_t)sizeof h || SPW_CALL(EIO, fsync(e->out)) != 0)
        return SPW_RAISE_SYS(err, errno != 0 ? errno : EIO, "data: write tokens of %s to %s", e->path, e->part);
    return SPW_OK;
}

static spw_status
open_packer(encoding *e, spw_error *err)
{
    const data_pack_options o = {.window = e->o->seq_length,
                                 .pad = word_of(e, e->o->end_of_text_set ? e->o->end_of_text : 0, CACHE_NO_LOSS),
                                 .first = word_of(e, 0, CACHE_FIRST),
                                 .emit = put_words,
                                 .ctx = e};
    return e->o->documents == SPW_DOCUMENTS_WHOLE ? spw__data_pack_open(&e->packer, &o, err) : SPW_OK;
}

/* The first line that has more than blanks; *text NULL: there is none, or none that is short enough. */
static spw_status
read_first_line(FILE *file, const char *path, char **text, uint64_t *bytes, spw_error *err)
{
    uint64_t room = READ_BYTES;
    char *line = spw_mem_zalloc(room);
    int c = 0;
    *text = NULL;
    *bytes = 0;
    while (line != NULL && (c = getc_unlocked(file)) != EOF && (c != '\n' || *bytes == 0) && *bytes < LINE_BYTES_MAX) {
        if (*bytes == 0 && (c == ' ' || c == '\t' || c == '\r' || c == '\n'))
            continue;
        if (*bytes == room) {
            char *more = spw_mem_zalloc(2 * room);
            if (more != NULL)
                memcpy(more, line, room);
            spw_mem_free(line);
            line = more;
            room *= 2;
        }
        if (line != NULL)
            line[(*bytes)++] = (char)c;
    }
    if (line == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "the first line of %s", path);
    if (*bytes > 0 && *bytes < LINE_BYTES_MAX)
        *text = line;
    else
        spw_mem_free(line);
    return SPW_OK;
}

/* Whether f's first line holds tokens. What is wrong with it is said when it is read. */
static spw_status
see_first_line(data_file *f, const spw_data_options *o, spw_error *err)
{
    spw_error ignored = {0};
    spw_data_line *line = NULL;
    FILE *file = fopen(f->path, "re");
    char *text;
    uint64_t bytes;
    spw_status st;
    if (file == NULL)
        return SPW_RAISE_SYS(err, errno, "data: open %s", f->path);
    st = read_first_line(file, f->path, &text, &bytes, err);
    fclose(file);
    if (st != SPW_OK || text == NULL || spw_data_line_open(&line, text, bytes, &ignored) != SPW_OK || line == NULL) {
        spw_mem_free(text);
        return st;
    }
    if (o->chat == NULL || !spw_chat_is_in(line, o->messages_field))
        f->of_tokens = o->pairs ? spw__data_pair_has_tokens(line, o) : spw_data_line_has_tokens(line, text_field(o));
    spw_data_line_close(line);
    spw_mem_free(text);
    return SPW_OK;
}

/* What happened to a file's pairs. */
static void
say_pairs(const encoding *e)
{
    bool named = e->o->prompt_field != NULL && e->o->prompt_field[0] != '\0';
    if (e->cut > 0)
        spw_log(
            SPW_LOG_NOTE,
            "data: %s: left out are %llu pairs longer than %llu tokens, %llu whose answers are the same or without a "
            "target",
            e->path, (unsigned long long)e->longer, (unsigned long long)e->o->seq_length, (unsigned long long)e->alike);
    if (e->apart > 0)
        spw_log(SPW_LOG_WARN,
                "data: %s: the answers of %llu of %llu pairs are to different prompts: what differs before them is "
                "compared, too",
                e->path, (unsigned long long)e->apart, (unsigned long long)e->documents);
    if (!e->prompted && (named || e->bare))
        spw_log(SPW_LOG_WARN, "data: %s: no pair has a prompt: no line has field \"%s\" (data.prompt_field)", e->path,
                named ? e->o->prompt_field : "prompt");
}

static spw_status
finish_windows(encoding *e, spw_error *err)
{
    uint64_t padding;
    if (e->packer != NULL && e->documents > 0) {
        SPW_TRY(spw__data_pack_finish(e->packer, &padding, &e->cut, err));
        spw_log(SPW_LOG_NOTE, "data: %s: %llu %s in %llu windows of %llu tokens, %.1f%% of them padding", e->path,
                (unsigned long long)e->documents, e->o->pairs ? "pairs" : "documents",
                (unsigned long long)((e->tokens - 1) / e->o->seq_length), (unsigned long long)e->o->seq_length,
                100.0 * (double)padding / (double)e->tokens);
    }
    if (e->o->pairs) {
        e->cut = e->longer + e->alike;
        say_pairs(e);
    }
    return SPW_OK;
}

/* O_TMPFILE needs the file system's help, and giving such a file its name /proc. */
static spw_status
open_part(encoding *e, const char *folder, spw_error *err)
{
    char link[64];
    e->out = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (e->out >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", e->out);
        e->nameless = access(link, F_OK) == 0;
    }
    if (e->nameless)
        return SPW_OK;
    if (e->out >= 0)
        close(e->out);
    e->out = SPW_CALL(EIO, mkostemp(e->part, O_CLOEXEC));
    return e->out >= 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "data.cache_dir: make %s", e->part);
}

/* Opens the cache file if it is there and what f needs; anything else is made anew. */
static bool
open_made(data_file *f, const spw_data_options *o, uint64_t key)
{
    f->fd = open(f->store, O_RDONLY | O_CLOEXEC);
    if (f->fd >= 0 && accept(f, o, key, NULL) == SPW_OK) {
        (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM); /* as spw__data_fd() says of windows */
        return true;
    }
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
    return false;
}

/* Another user's, in a folder that everybody writes to and nobody removes others' files from. */
static spw_status
in_the_way(const char *name, int errnum, spw_error *err)
{
    return SPW_RAISE_SYS(err, errnum, "data.cache_dir has to be another folder: %s cannot be read, nor replaced", name);
}

/*
 * What has the name already stays if it is accepted: another run, on a host that shares the folder say, has put it there and may read it, and one
 * that opens it finds a name at any time: it is f's, too. What is not accepted is replaced.
 */
static spw_status
place(data_file *f, const encoding *e, uint64_t key, spw_error *err)
{
    const char *name = f->store;
    char link[64];
    if (!e->nameless) {
        if (open_made(f, e->o, key))
            return unlink(e->part) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "data.cache_dir: remove %s", e->part);
        if (SPW_CALL(EIO, rename(e->part, name)) == 0)
            return SPW_OK;
        return errno == EPERM ? in_the_way(name, errno, err)
                              : SPW_RAISE_SYS(err, errno, "data.cache_dir: rename %s to %s", e->part, name);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", e->out);
    while (SPW_CALL(EIO, linkat(AT_FDCWD, link, AT_FDCWD, name, AT_SYMLINK_FOLLOW)) != 0) {
        int why = errno;
        if (why == EEXIST && open_made(f, e->o, key))
            return SPW_OK;
        if (why != EEXIST)
            return SPW_RAISE_SYS(err, why, "data.cache_dir: name %s", name);
        if (unlink(name) != 0 && errno != ENOENT)
            return in_the_way(name, errno, err);
    }
    return SPW_OK;
}

static spw_status
make(data_file *f, encoding *e, uint64_t key, const char *folder, spw_error *err)
{
    spw_status st = spw__data_fd(&e->fd, f->path, false, err);
    if (st != SPW_OK)
        return st;
    f->made = true;
    spw_log(f->bytes >= NOTED_BYTES ? SPW_LOG_NOTE : SPW_LOG_INFO, "data: making tokens of %s (%llu bytes) in %s",
            f->path, (unsigned long long)f->bytes, f->store);
    SPW_TRY(open_part(e, folder, err));
    e->buffered = HEADER_BYTES; /* zeros until the rest is known */
    st = open_packer(e, err);
    if (st == SPW_OK)
        st = f->format == SPW_DATA_JSONL ? encode_lines(e, err) : encode_text(e, err);
    if (st == SPW_OK)
        st = finish_windows(e, err);
    if (st == SPW_OK)
        st = flush(e, err);
    if (st == SPW_OK)
        st = write_header(e, key, err);
    if (st == SPW_OK)
        st = place(f, e, key, err);
    if (st != SPW_OK && !e->nameless)
        (void)unlink(e->part);
    return st;
}

spw_status
spw__data_encode(data_file *f, const spw_data_options *o, spw_error *err)
{
    char folder[PATH_MAX], name[PATH_MAX + 64], part[PATH_MAX + 128];
    bool wide =
        o->vocab > NARROW_VOCAB ||
        (o->vocab == 0 && (o->encode != NULL || (o->end_of_text_set && (uint64_t)o->end_of_text >= NARROW_VOCAB)));
    struct stat info;
    encoding *e;
    spw_status st;
    uint64_t key;
    if (stat(f->path, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->path);
    if (f->format == SPW_DATA_JSONL)
        SPW_TRY(see_first_line(f, o, err));
    SPW_TRY(cache_folder(o, folder, err));
    key = key_of(f, &info, o, wide);
    snprintf(name, sizeof name, "%s/%016llx.tokens", folder, (unsigned long long)key);
    snprintf(part, sizeof part, "%s.part-XXXXXX", name);
    spw_mem_free(f->store);
    if ((f->store = spw_mem_strdup(name)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "name of %s", name);
    f->element = wide ? E_CACHE32 : E_CACHE16;
    if (open_made(f, o, key))
        return SPW_OK;
    e = spw_mem_zalloc(sizeof *e);
    if (e == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tokenising %s", f->path);
    *e =
        (encoding){.o = o, .path = f->path, .fd = -1, .out = -1, .part = part, .wide = wide, .of_tokens = f->of_tokens};
    e->vocab = wide ? 1 << 30 : NARROW_VOCAB;
    e->vocab = o->vocab > 0 && o->vocab < e->vocab ? o->vocab : e->vocab;
    st = make(f, e, key, folder, err);
    if (e->fd >= 0)
        close(e->fd);
    if (e->out >= 0)
        close(e->out);
    spw__data_pack_close(e->packer);
    spw_mem_free(e->text);
    spw_mem_free(e->ids);
    spw_tokens_free(&e->turns);
    spw_tokens_free(&e->targets);
    spw_tokens_free(&e->listed);
    spw_tokens_free(&e->labels);
    spw_tokens_free(&e->lengths);
    spw_mem_free(e);
    SPW_TRY(st);
    if (f->fd >= 0) /* another run's */
        return SPW_OK;
    SPW_TRY(spw__data_fd(&f->fd, f->store, true, err));
    return accept(f, o, key, err);
}
