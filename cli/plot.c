/*
 * spillway plot: draws what the benchmarks wrote as JSON, as plain SVG without scripts or fonts of its own.
 *
 * A panel for each pattern (bench io, tune) or op (bench copy), size on a log2 axis, GB/s from 0 on one scale in all
 * panels, a line for each path, backend and depth; bars where a panel has one size only. Every row becomes a marker or a
 * bar: rows of one line with the same size stand above each other, nothing is averaged. Lines are told apart by colour,
 * marker, dashes and the number that the legend gives them. The picture is made in memory; files are left to
 * spw_file_write_text().
 */
#include "cli.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { PANELS_MAX = 64, SERIES_MAX = 256, LABEL_CHARS = 56 };

/* Pixels. A panel is the box of axes and what is written around it. */
enum { BOX_W = 380, BOX_H = 220, LEFT = 64, RIGHT = 20, TOP = 40, BOTTOM = 56, TITLE = 48, KEY_LINE = 20 };
enum { PANEL_W = LEFT + BOX_W + RIGHT, PANEL_H = TOP + BOX_H + BOTTOM };

typedef struct point {
    uint32_t panel_idx, series_idx;
    uint64_t size, line;
    double gb_s;
    bool io; /* size is a block's */
} point;

typedef struct chart {
    const char *path;
    char *panels[PANELS_MAX], *series[SERIES_MAX];
    uint32_t panel_count, series_count;
    point *points; /* by panel, series, size, rate */
    uint64_t point_count, skipped;
    double top, step; /* of the GB/s axis */
} chart;

/* ---------------------------------------------------------------- reading */

static spw_status bad(const chart *c, uint64_t line, spw_error *err, const char *fmt, ...) SPW_PRINTF(4, 5);

static spw_status
bad(const chart *c, uint64_t line, spw_error *err, const char *fmt, ...)
{
    char what[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    return SPW_RAISE(err, SPW_ECORRUPT, "%s, line %llu: %s", c->path, (unsigned long long)line, what);
}

/* The index of a name, added when it is new; false when there is no room or no memory. */
static bool
name_index(char **names, uint32_t *count, uint32_t count_max, const char *name, uint32_t *out)
{
    for (*out = 0; *out < *count; (*out)++) {
        if (strcmp(names[*out], name) == 0)
            return true;
    }
    if (*count == count_max || (names[*count] = spw_mem_strdup(name)) == NULL)
        return false;
    (*count)++;
    return true;
}

static spw_status
add_point(chart *c, bool io, const char *panel, const char *series, uint64_t size, double gb_s, uint64_t line,
          spw_error *err)
{
    point *p = &c->points[c->point_count];
    *p = (point){.size = size, .line = line, .gb_s = gb_s, .io = io};
    if (!name_index(c->panels, &c->panel_count, PANELS_MAX, panel, &p->panel_idx))
        return bad(c, line, err, "no room for another panel (%d at most)", PANELS_MAX);
    if (!name_index(c->series, &c->series_count, SERIES_MAX, series, &p->series_idx))
        return bad(c, line, err, "no room for another line (%d at most)", SERIES_MAX);
    c->point_count++;
    return SPW_OK;
}

static spw_status
get_text(const chart *c, const json_t *row, const char *name, uint64_t line, const char **out, spw_error *err)
{
    const json_t *v = json_object_get(row, name);
    *out = json_string_value(v);
    if (v == NULL)
        return bad(c, line, err, "%s is missing", name);
    return *out != NULL ? SPW_OK : bad(c, line, err, "%s is not a text", name);
}

static spw_status
get_count(const chart *c, const json_t *row, const char *name, uint64_t min, uint64_t line, uint64_t *out,
          spw_error *err)
{
    const json_t *v = json_object_get(row, name);
    *out = (uint64_t)json_integer_value(v);
    if (v == NULL)
        return bad(c, line, err, "%s is missing", name);
    if (!json_is_integer(v) || json_integer_value(v) < (json_int_t)min)
        return bad(c, line, err, "%s is not a whole number from %llu", name, (unsigned long long)min);
    return SPW_OK;
}

/* Every number a benchmark writes about time or rate is finite and not negative, drawn or not. */
static spw_status
check_numbers(const chart *c, const json_t *row, uint64_t line, spw_error *err)
{
    static const char *const names[] = {"gb_s", "p50_us", "p99_us", "cpu_s_per_gb", "ceiling_gb_s"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *v = json_object_get(row, names[i]);
        double x = json_number_value(v);
        if (v != NULL && !json_is_number(v))
            return bad(c, line, err, "%s is not a number", names[i]);
        if (v != NULL && (!isfinite(x) || x < 0 || x > 1e15))
            return bad(c, line, err, "%s is %g: not finite, negative or absurd", names[i], x);
    }
    return SPW_OK;
}

/* Takes a row with a pattern or an op; a header, and lines about something else, are counted and passed over. */
static spw_status
take_row(chart *c, const json_t *row, uint64_t line, spw_error *err)
{
    const char *panel, *path, *backend;
    uint64_t size, depth;
    double gb_s = json_number_value(json_object_get(row, "gb_s"));
    bool io = json_object_get(row, "pattern") != NULL;
    if (!json_is_object(row))
        return bad(c, line, err, "not a JSON object");
    if ((!io && json_object_get(row, "op") == NULL) || json_object_get(row, "gb_s") == NULL) {
        c->skipped++;
        return SPW_OK;
    }
    SPW_TRY(check_numbers(c, row, line, err));
    SPW_TRY(get_text(c, row, io ? "pattern" : "op", line, &panel, err));
    SPW_TRY(get_count(c, row, io ? "block" : "size", 1, line, &size, err));
    if (io) {
        char *series = NULL;
        spw_status st;
        SPW_TRY(get_text(c, row, "path", line, &path, err));
        SPW_TRY(get_text(c, row, "backend", line, &backend, err));
        SPW_TRY(get_count(c, row, "depth", 0, line, &depth, err));
        if (asprintf(&series, "%s  %s  depth %llu", path, backend, (unsigned long long)depth) < 0)
            return SPW_RAISE(err, SPW_ENOMEM, "reading %s", c->path);
        st = add_point(c, io, panel, series, size, gb_s, line, err);
        free(series);
        return st;
    }
    SPW_TRY(add_point(c, io, panel, "copy", size, gb_s, line, err));
    if (json_object_get(row, "ceiling_gb_s") != NULL)
        return add_point(c, io, panel, "memcpy, same run", size,
                         json_number_value(json_object_get(row, "ceiling_gb_s")), line, err);
    return SPW_OK;
}

/* Moves over white space, counting lines. */
static const char *
skip_space(const char *at, uint64_t *line)
{
    for (; *at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'; at++)
        *line += *at == '\n';
    return at;
}

/*
 * One value after the other from text: JSON lines, or the elements of one array. A value of JSON lines ends on the line
 * it starts on; in an array it may span lines, and is named by its first.
 */
static spw_status
read_rows(chart *c, const char *text, spw_error *err)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK;
    uint64_t line = 1;
    const char *at = skip_space(text, &line);
    bool array = *at == '[', more = true;
    if (array) {
        at = skip_space(at + 1, &line);
        more = *at != ']';
    }
    while (more && (array || *at != '\0')) {
        size_t len = strcspn(at, "\n");
        json_error_t je;
        json_t *row =
            array ? json_loads(at, flags, &je) : json_loadb(at, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &je);
        uint64_t first = line;
        spw_status st;
        if (row == NULL)
            return bad(c, line + (je.line > 1 ? (uint64_t)je.line - 1 : 0), err, "column %d: %s", je.column, je.text);
        st = take_row(c, row, first, err);
        json_decref(row);
        SPW_TRY(st);
        for (const char *end = at + (array ? (size_t)je.position : len); at < end; at++)
            line += *at == '\n';
        at = skip_space(at, &line);
        if (array) {
            more = *at == ',';
            if (!more && *at != ']')
                return bad(c, line, err, "a comma or the end of the array is missing");
            at = more ? skip_space(at + 1, &line) : at;
        }
    }
    if (array && *(at = skip_space(at + 1, &line)) != '\0')
        return bad(c, line, err, "text after the end of the array");
    return SPW_OK;
}

static int
by_place(const void *a, const void *b)
{
    const point *x = a, *y = b;
    if (x->panel_idx != y->panel_idx)
        return x->panel_idx < y->panel_idx ? -1 : 1;
    if (x->series_idx != y->series_idx)
        return x->series_idx < y->series_idx ? -1 : 1;
    if (x->size != y->size)
        return x->size < y->size ? -1 : 1;
    return x->gb_s < y->gb_s ? -1 : x->gb_s > y->gb_s;
}

static spw_status
chart_read(chart *c, spw_error *err)
{
    uint64_t objects = 0;
    char *text;
    spw_status st;
    SPW_TRY(spw_file_read_text(c->path, 256u << 20, &text, err));
    for (const char *at = text; *at != '\0'; at++) /* no more rows than opening braces, two points each */
        objects += *at == '{';
    c->points = spw_mem_calloc(2 * objects + 1, sizeof *c->points);
    if (c->points == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "rows of %s", c->path);
    else
        st = read_rows(c, text, err);
    spw_mem_free(text);
    if (st == SPW_OK && c->point_count == 0)
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s: no rows with gb_s and a pattern or an op (%llu lines without)", c->path,
                       (unsigned long long)c->skipped);
    if (st == SPW_OK)
        qsort(c->points, c->point_count, sizeof *c->points, by_place);
    return st;
}

static void
chart_free(chart *c)
{
    for (uint32_t i = 0; i < c->panel_count; i++)
        spw_mem_free(c->panels[i]);
    for (uint32_t i = 0; i < c->series_count; i++)
        spw_mem_free(c->series[i]);
    spw_mem_free(c->points);
}

/* ---------------------------------------------------------------- pieces of SVG */

/* The length of the UTF-8 sequence at s, 0 when it is none, or one that XML cannot hold. */
static unsigned
utf8_length(const unsigned char *s)
{
    unsigned len = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : (s[0] & 0xf0) == 0xe0 ? 3 : 0;
    if (s[0] >= 0xf0 && s[0] < 0xf5)
        len = 4;
    for (unsigned i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    }
    if (len == 1 && (s[0] < 0x20 || s[0] == 0x7f))
        return 0;
    if (len == 3 && ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] >= 0xa0) ||
                     (s[0] == 0xef && s[1] == 0xbf && s[2] >= 0xbe)))
        return 0; /* overlong, surrogate, U+FFFE and U+FFFF */
    if (len == 4 && ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] >= 0x90)))
        return 0;
    return len;
}

/* Text that XML can hold: markup escaped, what is no text as '?'; the front is left out beyond chars_max characters. */
static void
put_text(FILE *f, const char *text, uint64_t chars_max)
{
    const unsigned char *s = (const unsigned char *)text;
    uint64_t chars = 0;
    for (const unsigned char *at = s; *at != '\0'; at += utf8_length(at) > 0 ? utf8_length(at) : 1)
        chars++;
    if (chars > chars_max)
        fputs("...", f);
    for (; *s != '\0'; chars--) {
        unsigned len = utf8_length(s);
        if (chars <= chars_max) {
            switch (len == 0 ? '?' : s[0]) {
            case '&': fputs("&amp;", f); break;
            case '<': fputs("&lt;", f); break;
            case '>': fputs("&gt;", f); break;
            case '"': fputs("&quot;", f); break;
            case '?': fputc('?', f); break;
            default: fwrite(s, 1, len, f); break;
            }
        }
        s += len > 0 ? len : 1;
    }
}

/* "256K", "1M", "1.5M", "100". */
static const char *
size_text(char buf[32], double bytes)
{
    static const char *const units[] = {"", "K", "M", "G", "T", "P", "E"};
    int u = 0;
    for (; bytes >= 1024 && u < 6; u++)
        bytes /= 1024;
    snprintf(buf, 32, "%.4g%s", bytes, units[u]);
    return buf;
}

/* Okabe and Ito's colours, without the yellow that white paper swallows. */
static const char *
colour(uint32_t series_idx)
{
    static const char *const colours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"};
    return colours[series_idx % 7];
}

static const char *
dashes(uint32_t series_idx)
{
    static const char *const patterns[] = {"none", "6 3", "2 3"};
    return patterns[series_idx / 7 % 3];
}

static void
put_marker(FILE *f, uint32_t series_idx, double x, double y)
{
    static const char *const shapes[] = {"m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "m-3.5 -3.5h7v7h-7z",
                                         "m0 -5l5 8.5h-10z", "m0 -5l5 5l-5 5l-5 -5z"};
    fprintf(f, "<path d=\"M%.1f %.1f%s\" fill=\"%s\"", x, y, shapes[series_idx % 4], colour(series_idx));
}

static void
put_tooltip(FILE *f, const chart *c, const point *p)
{
    char size[32];
    fputs("><title>", f);
    put_text(f, c->series[p->series_idx], UINT64_MAX);
    fprintf(f, ": %s, %.4g GB/s (line %llu)</title></", size_text(size, (double)p->size), p->gb_s,
            (unsigned long long)p->line);
}

/* ---------------------------------------------------------------- panels */

static void
choose_scale(chart *c)
{
    double top = 1e-6, power;
    for (uint64_t i = 0; i < c->point_count; i++)
        top = c->points[i].gb_s > top ? c->points[i].gb_s : top;
    power = pow(10, floor(log10(top / 5)));
    c->step = power; /* 1, 2, 5 or 10 times a power of ten: about five lines */
    for (int i = 0; i < 3 && c->step < top / 5; i++)
        c->step = power * (i == 0 ? 2 : i == 1 ? 5 : 10);
    c->top = ceil(top / c->step * 1.02) * c->step; /* room for a marker on the highest value */
}

static double
y_of(const chart *c, double gb_s)
{
    return BOX_H * (1 - gb_s / c->top);
}

static void
put_frame(FILE *f, const chart *c, const char *name)
{
    fprintf(f, "<text x=\"%d\" y=\"-14\" font-size=\"14\" font-weight=\"bold\" text-anchor=\"middle\">", BOX_W / 2);
    put_text(f, name, LABEL_CHARS);
    fputs("</text>\n", f);
    for (int i = 0; i * c->step <= c->top * 1.0001; i++) {
        double y = y_of(c, i * c->step);
        fprintf(f,
                "<path d=\"M0 %.1fh%d\" stroke=\"%s\"/><text x=\"-8\" y=\"%.1f\" font-size=\"11\" "
                "text-anchor=\"end\">%.4g</text>\n",
                y, BOX_W, i == 0 ? "#222222" : "#DDDDDD", y + 4, i * c->step);
    }
    fprintf(f,
            "<path d=\"M0 0v%d\" stroke=\"#222222\"/><text transform=\"translate(-48 %d) rotate(-90)\" "
            "font-size=\"12\" text-anchor=\"middle\">GB/s</text>\n",
            BOX_H, BOX_H / 2);
}

/* One size: a bar for each row, with the legend's number below and the rate above. */
static void
put_bars(FILE *f, const chart *c, const point *p, uint64_t count)
{
    double pitch = (double)BOX_W / (double)count, w = pitch * 0.7 < 60 ? pitch * 0.7 : 60;
    char size[32];
    for (uint64_t i = 0; i < count; i++) {
        double x = pitch * ((double)i + 0.5), y = y_of(c, p[i].gb_s);
        fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\"", x - w / 2, y, w, BOX_H - y,
                colour(p[i].series_idx));
        put_tooltip(f, c, &p[i]);
        fputs("rect>", f);
        if (count <= 24)
            fprintf(f,
                    "<text x=\"%.1f\" y=\"%d\" font-size=\"11\" text-anchor=\"middle\">%u</text>"
                    "<text x=\"%.1f\" y=\"%.1f\" font-size=\"%d\" text-anchor=\"middle\">%.3g</text>",
                    x, BOX_H + 16, p[i].series_idx + 1, x, y - 4, count <= 12 ? 11 : 8, p[i].gb_s);
        fputc('\n', f);
    }
    fprintf(f, "<text x=\"%d\" y=\"%d\" font-size=\"12\" text-anchor=\"middle\">all at %s %s (bytes)</text>\n",
            BOX_W / 2, BOX_H + 38, p->io ? "block size" : "size", size_text(size, (double)p->size));
}

static void
put_lines(FILE *f, const chart *c, const point *p, uint64_t count, uint64_t size_min, uint64_t size_max)
{
    int first = (int)floor(log2((double)size_min)), last = (int)ceil(log2((double)size_max)), span = last - first;
    int every = span <= 3 ? 1 : span <= 14 ? 2 : span <= 28 ? 4 : 8;
    double per = BOX_W / (span + 0.6);
    char size[32];
    for (int k = first; k <= last; k++) {
        double x = per * (k - first + 0.3);
        fprintf(f, "<path d=\"M%.1f %dv%d\" stroke=\"#222222\"/>", x, BOX_H, k % every == 0 ? 6 : 3);
        if (k % every == 0)
            fprintf(f, "<text x=\"%.1f\" y=\"%d\" font-size=\"11\" text-anchor=\"middle\">%s</text>", x, BOX_H + 19,
                    size_text(size, ldexp(1, k)));
        fputc('\n', f);
    }
    fprintf(f, "<text x=\"%d\" y=\"%d\" font-size=\"12\" text-anchor=\"middle\">%s (bytes)</text>\n", BOX_W / 2,
            BOX_H + 40, p->io ? "block size" : "size");
    for (uint64_t i = 0, end; i < count; i = end) {
        uint32_t s = p[i].series_idx;
        fputs("<path d=\"", f);
        for (end = i; end < count && p[end].series_idx == s; end++)
            fprintf(f, "%c%.1f %.1f", end == i ? 'M' : 'L', per * (log2((double)p[end].size) - first + 0.3),
                    y_of(c, p[end].gb_s));
        fprintf(f, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.8\" stroke-dasharray=\"%s\"/>\n", colour(s),
                dashes(s));
        for (uint64_t j = i; j < end; j++) {
            put_marker(f, s, per * (log2((double)p[j].size) - first + 0.3), y_of(c, p[j].gb_s));
            put_tooltip(f, c, &p[j]);
            fputs("path>\n", f);
        }
    }
}

static void
put_legend(FILE *f, const chart *c, int x, int y)
{
    for (uint32_t s = 0; s < c->series_count; s++, y += KEY_LINE) {
        fprintf(f, "<path d=\"M%d %dh30\" stroke=\"%s\" stroke-width=\"1.8\" stroke-dasharray=\"%s\"/>", x, y,
                colour(s), dashes(s));
        put_marker(f, s, x + 15, y);
        fprintf(f, "/><text x=\"%d\" y=\"%d\" font-size=\"12\">%u  ", x + 38, y + 4, s + 1);
        put_text(f, c->series[s], LABEL_CHARS);
        fputs("</text>\n", f);
    }
}

static void
put_chart(FILE *f, const chart *c)
{
    int columns = c->panel_count <= 1 ? 1 : c->panel_count <= 4 ? 2 : 3;
    int rows = ((int)c->panel_count + columns - 1) / columns, width, height;
    size_t label = 0;
    for (uint32_t s = 0; s < c->series_count; s++)
        label = strlen(c->series[s]) > label ? strlen(c->series[s]) : label;
    label = label > LABEL_CHARS + 3 ? LABEL_CHARS + 3 : label;
    width = columns * PANEL_W + 80 + 7 * (int)label;
    height =
        rows * PANEL_H > (int)c->series_count * KEY_LINE + TOP ? rows * PANEL_H : (int)c->series_count * KEY_LINE + TOP;
    height += TITLE;
    fprintf(f,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" "
            "height=\"%d\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" fill=\"#222222\">\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"#FFFFFF\"/>\n"
            "<text x=\"%d\" y=\"30\" font-size=\"18\">GB/s by size, from ",
            width, height, width, height, width, height, LEFT);
    put_text(f, strrchr(c->path, '/') != NULL ? strrchr(c->path, '/') + 1 : c->path, LABEL_CHARS);
    fputs("</text>\n", f);
    for (uint64_t i = 0, end; i < c->point_count; i = end) {
        uint32_t panel = c->points[i].panel_idx;
        uint64_t size_min = UINT64_MAX, size_max = 0;
        for (end = i; end < c->point_count && c->points[end].panel_idx == panel; end++) {
            size_min = c->points[end].size < size_min ? c->points[end].size : size_min;
            size_max = c->points[end].size > size_max ? c->points[end].size : size_max;
        }
        fprintf(f, "<g transform=\"translate(%d %d)\">\n", (int)panel % columns * PANEL_W + LEFT,
                (int)panel / columns * PANEL_H + TITLE + TOP);
        put_frame(f, c, c->panels[panel]);
        if (size_min == size_max)
            put_bars(f, c, c->points + i, end - i);
        else
            put_lines(f, c, c->points + i, end - i, size_min, size_max);
        fputs("</g>\n", f);
    }
    put_legend(f, c, columns * PANEL_W + 16, TITLE + TOP);
    fputs("</svg>\n", f);
}

/* ---------------------------------------------------------------- the command */

static spw_status
chart_write(const chart *c, const char *out, spw_error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    bool failed;
    spw_status st;
    if (f == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "drawing %s", out);
    put_chart(f, c);
    failed = ferror(f) != 0;
    failed = fclose(f) != 0 || failed;
    st = failed ? SPW_RAISE(err, SPW_ENOMEM, "drawing %s", out) : spw_file_write_text(out, text, err);
    free(text);
    return st;
}

static bool
same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

int
cli_plot(int argc, char **argv)
{
    static chart c; /* large */
    const char *out = NULL;
    spw_error err = {0};
    spw_status st;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-o") == 0) {
            if ((out = cli_value("plot", argc, argv, &i)) == NULL)
                return EXIT_USAGE;
        } else if (argv[i][0] == '-') {
            return cli_unknown_option("plot", argv[i]);
        } else if (c.path != NULL) {
            return cli_usage("plot", "one file at a time, got %s too", argv[i]);
        } else {
            c.path = argv[i];
        }
    }
    if (c.path == NULL)
        return cli_usage("plot", "a file from bench --json or tune is needed");
    if (out == NULL)
        return cli_usage("plot", "-o OUT.svg is needed");
    if (same_file(c.path, out))
        return cli_usage("plot", "%s would be overwritten by its picture", c.path);
    st = cli_check_replaced("-o", out, &err);
    if (st == SPW_OK)
        st = chart_read(&c, &err);
    if (st == SPW_OK) {
        choose_scale(&c);
        st = chart_write(&c, out, &err);
    }
    if (st == SPW_OK)
        printf("wrote %s: %u panels, %u lines, %llu points\n", out, c.panel_count, c.series_count,
               (unsigned long long)c.point_count);
    chart_free(&c);
    return st == SPW_OK ? EXIT_DONE : cli_fail(&err);
}
