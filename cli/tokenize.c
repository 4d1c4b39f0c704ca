/*
 * spillway tokenize: text files to one token file as llm.c reads them.
 *
 *   256 x int32: magic, version, token count, zeros | uint16 or uint32 for each token
 *
 * A file is a document, or of JSON lines each line; the end-of-text token stands before every document. The work is
 * cut into pieces by the text alone, where cutting changes no id; threads take pieces of a batch, and the batch is written
 * in order, so the number of threads changes nothing. The output is written beside its place and renamed at the end.
 */
#include "cli.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE_BYTES = 1 << 20, PIECES_PER_THREAD = 8, HEADER_INTS = 256, THREADS_MAX = 1024 };
enum { MAGIC_16 = 20240520, VERSION_16 = 1, MAGIC_32 = 20240801, VERSION_32 = 7 };

/* A stretch of one file: whole documents, or a part of one. */
typedef struct piece {
    const char *path;
    const char *file; /* start of the mapping */
    uint64_t file_bytes, begin, end;
    bool lines, last; /* JSON lines; the file can be unmapped after it */
    spw_tokens ids;   /* turned into what the file holds, in place */
    uint64_t documents;
    spw_status st;
    spw_error err;
} piece;

typedef struct job {
    /* What was asked for. */
    const char *const *inputs;
    const char *out_path, *tokenizer_path, *field, *end_text, *begin_text, *format;
    uint64_t input_count, threads;
    bool special, quiet;
    /* Fixed during the run. */
    spw_data_format *formats; /* (input_count) text or JSON lines */
    spw_tokenizer *tokenizer;
    int32_t end_id; /* of what is before a document, with what begins it; -1: none */
    spw_begin begin;
    bool wide; /* uint32 */
    uint64_t bytes_total, start_ns;
    /* The main thread's. */
    piece *pieces;
    uint64_t piece_count, pieces_max;
    uint64_t input_idx, file_bytes, at; /* of the file that is being cut */
    char *file;
    uint64_t tokens, documents, bytes_done, shown_ns;
    char tmp[SPW_PATH_BYTES + 32];
    int fd;
} job;

/* ---------------------------------------------------------------- encoding, on any thread */

static spw_status
add_document(const job *j, piece *p, const char *text, uint64_t bytes, bool first_part)
{
    if (bytes == 0)
        return SPW_OK;
    if (first_part) {
        p->documents++;
        if (j->end_id >= 0)
            SPW_TRY(spw_tokens_push(&p->ids, j->end_id, &p->err));
        SPW_TRY(spw_tokens_push_begin(&p->ids, &j->begin, &p->err));
    }
    return first_part ? spw_tokenizer_encode(j->tokenizer, text, bytes, j->special, &p->ids, &p->err)
                      : spw_tokenizer_encode_rest(j->tokenizer, text, bytes, j->special, &p->ids, &p->err);
}

static spw_status
bad_line(piece *p, const char *line, spw_status st)
{
    uint64_t number = 1;
    for (const char *c = p->file; (c = memchr(c, '\n', (size_t)(line - c))) != NULL; c++)
        number++;
    spw_error_wrap(&p->err, "%s, line %llu", p->path, (unsigned long long)number);
    return st;
}

static spw_status
add_line(const job *j, piece *p, const char *line, uint64_t bytes)
{
    spw_data_line *object;
    const char *text;
    uint64_t text_bytes;
    spw_status st = spw_data_line_open(&object, line, bytes, &p->err);
    if (st != SPW_OK)
        return bad_line(p, line, st);
    if (object == NULL)
        return SPW_OK;
    st = spw_data_line_text(object, j->field != NULL ? j->field : "text", &text, &text_bytes, &p->err);
    st = st == SPW_OK ? add_document(j, p, text, text_bytes, true) : bad_line(p, line, st);
    spw_data_line_close(object);
    return st;
}

/* int32 to uint16, where they stand. */
static void
make_narrow(spw_tokens *ids)
{
    char *bytes = (char *)ids->ids;
    for (uint64_t i = 0; i < ids->count; i++) {
        uint16_t id = (uint16_t)ids->ids[i];
        memcpy(bytes + 2 * i, &id, sizeof id);
    }
}

static void
encode_piece(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const job *j = ctx;
    piece *p = &j->pieces[part_idx];
    (void)worker_idx;
    if (cli_stop)
        return;
    if (!p->lines)
        p->st = add_document(j, p, p->file + p->begin, p->end - p->begin, p->begin == 0);
    for (uint64_t at = p->begin, end; p->lines && at < p->end && p->st == SPW_OK; at = end + 1) {
        const char *newline = memchr(p->file + at, '\n', p->end - at);
        end = newline != NULL ? (uint64_t)(newline - p->file) : p->end;
        p->st = add_line(j, p, p->file + at, end - at);
    }
    if (!j->wide)
        make_narrow(&p->ids);
}

/* ---------------------------------------------------------------- input, cut into pieces */

static spw_status
open_input(job *j, spw_error *err)
{
    const char *path = j->inputs[j->input_idx];
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    j->file = NULL;
    j->at = 0;
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "open %s", path);
    if (fstat(fd, &info) != 0) {
        close(fd);
        return SPW_RAISE_SYS(err, errno, "stat %s", path);
    }
    j->file_bytes = (uint64_t)info.st_size;
    if (j->file_bytes > 0) {
        void *map = mmap(NULL, j->file_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            spw_status st = SPW_RAISE_SYS(err, errno, "mapping %s", path);
            close(fd);
            return st;
        }
        (void)madvise(map, j->file_bytes, MADV_SEQUENTIAL); /* a hint */
        j->file = map;
    }
    close(fd);
    return SPW_OK;
}

/* Fills the list of pieces; none: all inputs are done. */
static spw_status
cut_batch(job *j, spw_error *err)
{
    for (j->piece_count = 0; j->piece_count < j->pieces_max && j->input_idx < j->input_count;) {
        const char *path = j->inputs[j->input_idx];
        piece *p = &j->pieces[j->piece_count];
        uint64_t end = 0;
        if (j->file == NULL)
            SPW_TRY(open_input(j, err));
        if (j->file == NULL) { /* empty */
            j->input_idx++;
            continue;
        }
        p->ids.count = 0;
        *p = (piece){.path = path, .file = j->file, .file_bytes = j->file_bytes, .begin = j->at, .ids = p->ids};
        p->lines = j->formats[j->input_idx] == SPW_DATA_JSONL;
        if (j->file_bytes - j->at <= PIECE_BYTES) {
            end = j->file_bytes;
        } else if (p->lines) {
            const char *newline = memchr(j->file + j->at + PIECE_BYTES, '\n', j->file_bytes - j->at - PIECE_BYTES);
            end = newline != NULL ? (uint64_t)(newline - j->file) + 1 : j->file_bytes;
        } else {
            end = spw_tokenizer_cut(j->tokenizer, j->file, j->file_bytes, j->at + PIECE_BYTES);
        }
        p->end = j->at = end;
        j->piece_count++;
        if (end == j->file_bytes) {
            p->last = true; /* the mapping is the piece's now */
            j->file = NULL;
            j->input_idx++;
        }
    }
    return SPW_OK;
}

static job *reading; /* for the handler below */

static bool
is_in(const char *at, const char *file, uint64_t bytes)
{
    return file != NULL && at >= file && at < file + bytes;
}

static void
say(const char *text)
{
    (void)!write(STDERR_FILENO, text, strlen(text));
}

/* A mapping ends where its file was cut off meanwhile, or its disk does not read: what is lost is the page, and then the run, not without a word. */
static void
lose_input(int sig, siginfo_t *info, void *unused)
{
    const job *j = reading;
    const char *path = is_in(info->si_addr, j->file, j->file_bytes) ? j->inputs[j->input_idx] : NULL;
    (void)unused;
    for (uint64_t i = 0; path == NULL && i < j->piece_count; i++) {
        const piece *p = &j->pieces[i];
        path = is_in(info->si_addr, p->file, p->file_bytes) ? p->path : NULL;
    }
    if (path == NULL) {
        (void)signal(sig, SIG_DFL);
        return;
    }
    say("spillway: input ");
    say(path);
    say(" was cut off while it was read, or its disk failed; nothing was written to ");
    say(j->out_path);
    say("\n");
    (void)unlink(j->tmp);
    _exit(EXIT_FAILED);
}

/* ---------------------------------------------------------------- output */

static spw_status
write_all(const job *j, const void *data, uint64_t bytes, spw_error *err)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t rc = write(j->fd, at, bytes);
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            return SPW_RAISE_SYS(err, errno, "writing %s, after %llu tokens", j->tmp, (unsigned long long)j->tokens);
        at += rc;
        bytes -= (uint64_t)rc;
    }
    return SPW_OK;
}

static spw_status
write_header(const job *j, spw_error *err)
{
    int32_t header[HEADER_INTS] = {j->wide ? MAGIC_32 : MAGIC_16, j->wide ? VERSION_32 : VERSION_16,
                                   (int32_t)j->tokens};
    if (lseek(j->fd, 0, SEEK_SET) != 0)
        return SPW_RAISE_SYS(err, errno, "seeking in %s", j->tmp);
    return write_all(j, header, sizeof header, err);
}

static void
show(job *j, bool at_end)
{
    uint64_t now = spw_now_ns();
    double seconds = (double)(now - j->start_ns) * 1e-9, mb = (double)j->bytes_done * 1e-6;
    bool terminal = isatty(STDERR_FILENO) != 0;
    if (j->quiet || (!at_end && now - j->shown_ns < (terminal ? 500000000u : 10000000000u)))
        return;
    j->shown_ns = now;
    if (!at_end || terminal)
        fprintf(stderr, "%s%5.1f %%  %.1f of %.1f MB  %.1f MB/s  %llu tokens%s", terminal ? "\r" : "",
                j->bytes_total > 0 ? 100.0 * (double)j->bytes_done / (double)j->bytes_total : 100.0, mb,
                (double)j->bytes_total * 1e-6, seconds > 0 ? mb / seconds : 0, (unsigned long long)j->tokens,
                terminal && !at_end ? "   " : "\n");
    if (at_end)
        printf("%s: %llu documents, %llu tokens (%s), %.2f bytes per token, %.1f MB in %.1f s\n", j->out_path,
               (unsigned long long)j->documents, (unsigned long long)j->tokens, j->wide ? "uint32" : "uint16",
               j->tokens > 0 ? (double)j->bytes_done / (double)j->tokens : 0, mb, seconds);
}

static spw_status
write_batch(job *j, spw_error *err)
{
    for (uint64_t i = 0; i < j->piece_count; i++) {
        piece *p = &j->pieces[i];
        if (p->st != SPW_OK) {
            *err = p->err;
            if (!p->lines)
                spw_error_wrap(err, "%s", p->path);
            return p->st;
        }
        if (j->tokens + p->ids.count > INT32_MAX)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: a token file holds at most %d tokens; give it fewer inputs",
                             p->path, INT32_MAX);
        SPW_TRY(write_all(j, p->ids.ids, p->ids.count * (j->wide ? 4 : 2), err));
        j->tokens += p->ids.count;
        j->documents += p->documents;
        j->bytes_done += p->end - p->begin;
    }
    return SPW_OK;
}

static void
unmap_batch(job *j)
{
    for (uint64_t i = 0; i < j->piece_count; i++) {
        if (j->pieces[i].last)
            munmap((void *)(uintptr_t)j->pieces[i].file, j->pieces[i].file_bytes);
    }
    j->piece_count = 0;
}

static spw_status
convert(job *j, spw_pool *pool, spw_error *err)
{
    struct sigaction lost = {.sa_sigaction = lose_input, .sa_flags = SA_SIGINFO};
    spw_status st = write_header(j, err); /* its count comes last */
    reading = j;
    (void)sigaction(SIGBUS, &lost, NULL);
    while (st == SPW_OK) {
        if ((st = cut_batch(j, err)) == SPW_OK && j->piece_count == 0)
            break;
        if (st == SPW_OK)
            spw_pool_run(pool, (uint32_t)j->piece_count, encode_piece, j);
        if (st == SPW_OK)
            st = cli_stop ? SPW_RAISE(err, SPW_ECANCELED, "stopped; nothing was written to %s", j->out_path)
                          : write_batch(j, err);
        unmap_batch(j);
        show(j, false);
    }
    if (j->file != NULL) {
        munmap(j->file, j->file_bytes);
        j->file = NULL;
    }
    (void)signal(SIGBUS, SIG_DFL);
    if (st == SPW_OK)
        st = write_header(j, err);
    if (st == SPW_OK && fsync(j->fd) != 0)
        st = SPW_RAISE_SYS(err, errno, "fsync %s", j->tmp);
    return st;
}

/* ---------------------------------------------------------------- the command */

/* What an input holds, unless --format says it. */
static spw_status
find_format(const job *j, uint64_t input_idx, bool *warned, spw_error *err)
{
    spw_data_format *f = &j->formats[input_idx];
    if (j->format != NULL) {
        if (!spw_data_format_parse(j->format, f) || *f == SPW_DATA_LLMC || *f == SPW_DATA_LLMQ ||
            *f == SPW_DATA_MEGATRON)
            return SPW_RAISE(err, SPW_ECONFIG, "--format %s is none of auto, text, jsonl", j->format);
        if (*f != SPW_DATA_AUTO)
            return SPW_OK;
    }
    SPW_TRY(spw_data_recognise(f, j->inputs[input_idx], warned, err));
    return *f == SPW_DATA_TEXT || *f == SPW_DATA_JSONL
               ? SPW_OK
               : SPW_RAISE(err, SPW_EUNSUPPORTED, "input %s holds tokens already (%s), which train reads as they are",
                           j->inputs[input_idx], spw_data_format_name(*f));
}

/* All inputs are there and can be read and none of them is the output, before anything is made. */
static spw_status
check_inputs(job *j, spw_error *err)
{
    struct stat in, out;
    bool there = stat(j->out_path, &out) == 0, lines = false, warned = false;
    SPW_TRY(cli_check_replaced("-o", j->out_path, err));
    for (uint64_t i = 0; i < j->input_count; i++) {
        if (stat(j->inputs[i], &in) != 0)
            return SPW_RAISE_SYS(err, errno, "input %s", j->inputs[i]);
        if (!S_ISREG(in.st_mode))
            return SPW_RAISE(err, SPW_EINVAL, "input %s is not a regular file", j->inputs[i]);
        if (there && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return SPW_RAISE(err, SPW_EINVAL, "input %s would be overwritten by -o", j->inputs[i]);
        j->bytes_total += (uint64_t)in.st_size;
        SPW_TRY(find_format(j, i, &warned, err));
        lines = lines || j->formats[i] == SPW_DATA_JSONL;
    }
    if (j->field != NULL && !lines)
        return SPW_RAISE(err, SPW_EINVAL,
                         "--field %s names the text in JSON lines, and no input holds such (their names end in .jsonl, "
                         "or --format jsonl)",
                         j->field);
    return SPW_OK;
}

static spw_status
choose_end(job *j, spw_error *err)
{
    if (j->end_text == NULL)
        j->end_id = spw_tokenizer_end(j->tokenizer);
    else
        j->end_id = spw_tokenizer_find(j->tokenizer, j->end_text, strlen(j->end_text));
    if (j->end_id < 0 && j->end_text == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "%s has no end-of-text token; --end TEXT names one, --end '' does without",
                         j->tokenizer_path);
    if (j->end_id < 0 && j->end_text[0] != '\0')
        return SPW_RAISE(err, SPW_EINVAL, "%s has no token \"%s\" for --end", j->tokenizer_path, j->end_text);
    return SPW_OK;
}

/* A token that ends documents and begins texts is put once. */
static spw_status
choose_begin(job *j, spw_error *err)
{
    if (j->begin_text == NULL) {
        j->begin = spw_tokenizer_begin(j->tokenizer);
    } else if (j->begin_text[0] != '\0') {
        j->begin = (spw_begin){1, {spw_tokenizer_find(j->tokenizer, j->begin_text, strlen(j->begin_text))}};
        if (j->begin.ids[0] < 0)
            return SPW_RAISE(err, SPW_EINVAL, "%s has no token \"%s\" for --begin", j->tokenizer_path, j->begin_text);
    }
    if (j->begin.count == 1 && j->begin.ids[0] == j->end_id)
        j->begin.count = 0;
    return SPW_OK;
}

static spw_status
run(job *j, spw_error *err)
{
    spw_pool *pool = NULL;
    spw_status st;
    SPW_TRY(check_inputs(j, err));
    SPW_TRY(spw_tokenizer_open(&j->tokenizer, j->tokenizer_path, err));
    SPW_TRY(choose_end(j, err));
    SPW_TRY(choose_begin(j, err));
    j->wide = spw_tokenizer_vocab(j->tokenizer) > 65536;
    SPW_TRY(spw_pool_create(&pool, (uint32_t)j->threads, "tokenize", err));
    j->pieces_max = (uint64_t)spw_pool_threads(pool) * PIECES_PER_THREAD;
    j->pieces = spw_mem_calloc(j->pieces_max, sizeof *j->pieces);
    snprintf(j->tmp, sizeof j->tmp, "%s.tmp-%ld", j->out_path, (long)getpid());
    if (j->pieces == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "%llu pieces of text", (unsigned long long)j->pieces_max);
    else if ((j->fd = open(j->tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) < 0)
        st = SPW_RAISE_SYS(err, errno, "open %s", j->tmp);
    else
        st = convert(j, pool, err);
    if (st == SPW_OK && j->documents == 0)
        st = SPW_RAISE(err, SPW_EINVAL, "the inputs hold no text");
    if (j->fd >= 0 && close(j->fd) != 0 && st == SPW_OK)
        st = SPW_RAISE_SYS(err, errno, "close %s", j->tmp);
    if (st == SPW_OK && rename(j->tmp, j->out_path) != 0)
        st = SPW_RAISE_SYS(err, errno, "renaming %s to %s", j->tmp, j->out_path);
    if (st != SPW_OK && j->fd >= 0)
        (void)unlink(j->tmp);
    if (st == SPW_OK)
        st = spw_dir_sync_above(j->out_path, err);
    spw_pool_destroy(pool);
    for (uint64_t i = 0; j->pieces != NULL && i < j->pieces_max; i++)
        spw_tokens_free(&j->pieces[i].ids);
    spw_mem_free(j->pieces);
    return st;
}

int
cli_tokenize(int argc, char **argv)
{
    const char **inputs = spw_mem_calloc((size_t)argc, sizeof *inputs);
    spw_data_format *formats = spw_mem_calloc((size_t)argc, sizeof *formats);
    job j = {.inputs = inputs, .formats = formats, .fd = -1};
    spw_error err = {0};
    int rc = EXIT_DONE;
    if (inputs == NULL || formats == NULL)
        rc = cli_fail(&(spw_error){.status = SPW_ENOMEM, .message = "no memory for the list of inputs"});
    for (int i = 1; i < argc && rc == EXIT_DONE; i++) {
        const char *name = argv[i], *value;
        const char **to = strcmp(name, "-o") == 0            ? &j.out_path
                          : strcmp(name, "--tokenizer") == 0 ? &j.tokenizer_path
                          : strcmp(name, "--field") == 0     ? &j.field
                          : strcmp(name, "--format") == 0    ? &j.format
                          : strcmp(name, "--end") == 0       ? &j.end_text
                          : strcmp(name, "--begin") == 0     ? &j.begin_text
                                                             : NULL;
        if (name[0] != '-')
            inputs[j.input_count++] = name;
        else if (strcmp(name, "--special") == 0)
            j.special = true;
        else if (strcmp(name, "--quiet") == 0)
            j.quiet = true;
        else if (to == NULL && strcmp(name, "--threads") != 0)
            rc = cli_unknown_option("tokenize", name);
        else if ((value = cli_value("tokenize", argc, argv, &i)) == NULL)
            rc = EXIT_USAGE;
        else if (to != NULL)
            *to = value;
        else if (!cli_number(value, &j.threads) || j.threads < 1 || j.threads > THREADS_MAX)
            rc = cli_usage("tokenize", "--threads %s is not a number from 1 to %d", value, THREADS_MAX);
    }
    if (rc == EXIT_DONE && (j.input_count == 0 || j.tokenizer_path == NULL || j.out_path == NULL))
        rc = cli_usage("tokenize", "%s is needed",
                       j.input_count == 0   ? "a text file"
                       : j.out_path == NULL ? "-o OUT.bin"
                                            : "--tokenizer PATH");
    if (rc == EXIT_DONE && strlen(j.out_path) >= SPW_PATH_BYTES)
        rc = cli_usage("tokenize", "the path of -o is too long");
    if (rc == EXIT_DONE) {
        cli_catch_signals();
        j.start_ns = j.shown_ns = spw_now_ns();
        if (run(&j, &err) != SPW_OK)
            rc = cli_fail(&err);
        else
            show(&j, true);
        spw_tokenizer_close(j.tokenizer);
    }
    spw_mem_free(formats);
    spw_mem_free(inputs);
    return rc;
}
