/* Counts the file operations of a process below one folder, and lets one of them fail or end the process.

   Preloaded in front of libc. `faults_arm(folder, n, mode, last)` starts to count; the n-th operation below `folder`
   fails with ENOSPC or EIO, or the process is killed before it, in the middle of it (half of a write) or behind it.
   A disk that is full stays so: every later write fails too. Where the process lives on, it is killed before operation
   number `last`, if that is not 0.
   An operation that makes, names, writes, reads or syncs a file counts; closing one does not. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL_ENOSPC, FAIL_EIO, KILL_BEFORE, KILL_INSIDE, KILL_BEHIND };
enum { FILES = 4096 };

static char folder[4096];
static long counted, wanted, last;
static int mode;
static char below[FILES]; /* descriptors of files in the folder */

void faults_arm(const char *path, long n, int how, long end) {
    strncpy(folder, path, sizeof folder - 1);
    counted = 0, wanted = n, mode = how, last = end;
    memset(below, 0, sizeof below);
}

long faults_counted(void) { return counted; }

static int inside(const char *path) { return *folder && path && !strncmp(path, folder, strlen(folder)); }
static int known(int fd) { return *folder && fd >= 0 && fd < FILES && below[fd]; }
static void die(void) { kill(getpid(), SIGKILL); }

/* Whether this operation must fail, with errno set; kills where that was asked for. */
static int fault(int counts, int writes) {
    if (!counts) return 0;
    if (++counted == last) die();
    errno = ENOSPC;
    if (mode == FAIL_ENOSPC && writes && wanted && counted > wanted) return 1;
    if (counted != wanted) return 0;
    if (mode == KILL_BEFORE || (mode == KILL_INSIDE && !writes)) die();
    if (mode > FAIL_EIO) return 0;
    if (mode == FAIL_EIO) errno = EIO;
    return 1;
}
static int now(int counts) { return counts && counted == wanted; }
static void behind(int counts) { if (now(counts) && mode >= KILL_INSIDE) die(); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
/* An operation on `where`, which is below the folder if `test` says so; `writes` if half of it can be done. */
#define WRAP(type, name, arguments, call, test, size, half) \
    type name arguments { \
        REAL(name); int counts = test; \
        if (fault(counts, (size) > 1)) return -1; \
        if (now(counts) && mode == KILL_INSIDE && (size) > 1) { real half; die(); } \
        type result = real call; int error = errno; behind(counts); errno = error; return result; \
    }

WRAP(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), known(fd), n, (fd, b, n / 2))
WRAP(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), known(fd), n, (fd, b, n / 2, o))
WRAP(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), known(fd), n, (fd, b, n / 2, o))
WRAP(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), known(fd), n, (fd, v, n / 2))
WRAP(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n), known(fd), 0, (fd, b, n))
WRAP(int, fsync, (int fd), (fd), known(fd), 0, (fd))
WRAP(int, fdatasync, (int fd), (fd), known(fd), 0, (fd))
WRAP(int, ftruncate, (int fd, off_t n), (fd, n), known(fd), 0, (fd, n))
WRAP(int, ftruncate64, (int fd, off64_t n), (fd, n), known(fd), 0, (fd, n))
WRAP(int, truncate, (const char *p, off_t n), (p, n), inside(p), 0, (p, n))
WRAP(int, rename, (const char *a, const char *b), (a, b), inside(a) || inside(b), 0, (a, b))
WRAP(int, renameat, (int x, const char *a, int y, const char *b), (x, a, y, b), inside(a) || inside(b), 0, (x, a, y, b))
WRAP(int, unlink, (const char *p), (p), inside(p), 0, (p))
WRAP(int, rmdir, (const char *p), (p), inside(p), 0, (p))
WRAP(int, mkdir, (const char *p, mode_t m), (p, m), inside(p), 0, (p, m))

#define OPEN(name) \
    int name(const char *p, int flags, ...) { \
        REAL(name); mode_t m = 0; int counts = inside(p); \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); m = va_arg(more, mode_t); va_end(more); } \
        if (fault(counts, 0)) return -1; \
        int fd = real(p, flags, m), error = errno; \
        if (fd >= 0 && fd < FILES) below[fd] = counts != 0; \
        behind(counts); errno = error; return fd; \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < FILES) below[fd] = 0;
    return real(fd);
}
