package browser

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// started is the one browser of this test binary. It is never closed: it ends with the process that started it,
// whose death its debugging pipe shows.
var started struct {
	once sync.Once
	ctx  context.Context // chromedp keeps the process in it
	stop func()
	err  error
}

// Tests are those of a package that opens pages: wrap testing.M in it in TestMain.
type Tests struct{ M interface{ Run() int } }

// Run runs the tests and then ends the browser.
func (t Tests) Run() int {
	code := t.M.Run()
	if started.stop != nil {
		started.stop()
	}
	return code
}

// process is the browser, which the first test starts.
func process(tb testing.TB) context.Context {
	tb.Helper()
	started.once.Do(func() { started.ctx, started.stop, started.err = start() })
	if started.err != nil {
		tb.Fatalf("start a browser: %v", started.err)
	}
	return started.ctx
}

// start runs the browser. Without the flags about the background it calls its maker's hosts.
func start() (context.Context, func(), error) {
	binary, err := find()
	if err != nil {
		return nil, nil, err
	}
	profile, err := os.MkdirTemp("", "lanekeeper-browser-")
	if err != nil {
		return nil, nil, err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.UserDataDir(profile), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("font-render-hinting", "none"),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"),
		chromedp.WSURLReadTimeout(2*time.Minute))
	allocator, endProcess := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, endBrowser := chromedp.NewContext(allocator)
	stop := func() {
		endBrowser()
		endProcess()
		_ = os.RemoveAll(profile) // what is left is in the folder for temporary files
	}
	if err := chromedp.Run(ctx); err != nil {
		stop()
		return nil, nil, fmt.Errorf("%s: %w", binary, err)
	}
	return ctx, stop, nil
}

// find is where the browser is; it is installed when it is missing and can be.
func find() (string, error) {
	if set := os.Getenv("AGENT_TEST_BROWSER"); set != "" {
		return set, nil
	}
	if path := onPath(); path != "" {
		return path, nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return "", fmt.Errorf("no Chromium here; install it (sudo apt-get install -y chromium) or name one in " +
			"AGENT_TEST_BROWSER")
	}
	if err := install(apt); err != nil {
		return "", err
	}
	if path := onPath(); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("chromium was installed, but is not on the PATH; name it in AGENT_TEST_BROWSER")
}

func onPath() string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// install has Debian's package installed. Other tests may be installing something else: it waits for them, and
// tries again when they held the lock that cannot be waited for.
func install(apt string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		if last = aptGet(ctx, apt, "install", "-y", "--no-install-recommends", "chromium"); last == nil {
			return nil
		}
		if err := aptGet(ctx, apt, "update"); err != nil {
			last = err
		}
		select {
		case <-ctx.Done():
		case <-time.After(2 * time.Second):
		}
	}
	return fmt.Errorf("install Chromium (apt-get install -y chromium): %w", last)
}

func aptGet(ctx context.Context, apt string, args ...string) error {
	cmd := exec.CommandContext(ctx, apt, append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		text := out.Bytes()
		return fmt.Errorf("apt-get %s: %w: %s", args[0], err, text[max(0, len(text)-500):])
	}
	return nil
}
