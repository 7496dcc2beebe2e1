package chat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
)

// File is a file of a message: the id of a document, or its content.
type File struct {
	ID          string
	Name        string
	ContentType string // as the client claims
	Content     []byte
}

const (
	maxFiles   = 10   // of one message
	maxExcerpt = 4000 // bytes of a document that the model reads with the message

	maxImageBytes = 2 * threads.MaxImageSize // of the images among the files of a request
)

// readFiles decodes the files of a new message. param names the message in errors.
func (c *Chat) readFiles(parts []filePart, param string) (files []File, err error) {
	if len(parts) > maxFiles {
		return nil, badRequest(param, "too_many_files", "A message has at most %d files.", maxFiles)
	}
	for _, p := range parts {
		f, err := p.read(c.DocumentBytes)
		if err != nil {
			return nil, fileError(err)
		}
		files = append(files, f)
	}
	return files, nil
}

// attachFiles attaches the files of the messages to the thread and stores the included ones. texts are the messages
// with the part of each file that the model reads; docs are the documents of each message. On a channel of people, a
// file that exceeds the quota of the thread becomes a line of the text.
func (c *Chat) attachFiles(
	ctx context.Context, tx pgx.Tx, a *UserMessage,
) (texts []string, docs [][]documents.Document, err error) {
	texts, docs = slices.Clone(a.Texts), make([][]documents.Document, len(a.Texts))
	for i, files := range a.Files {
		for _, f := range files {
			d, err := c.attachFile(ctx, tx, a, f)
			if a.headless() && errors.Is(err, documents.ErrTooMany) {
				texts[i] = strings.TrimSpace(texts[i] + fmt.Sprintf("\n[The file %q is missing: %s.]",
					documents.CleanName(f.Name), err))
				continue
			}
			if err != nil {
				return nil, nil, fileError(err)
			}
			shown, err := documents.Render(ctx, tx, d, maxExcerpt)
			if err != nil {
				return nil, nil, err
			}
			texts[i] = strings.TrimSpace(texts[i] + "\n\n" + shown)
			docs[i] = append(docs[i], d)
		}
	}
	return texts, docs, nil
}

// attachFile attaches a document to the thread, or stores the included file there.
func (c *Chat) attachFile(ctx context.Context, tx pgx.Tx, a *UserMessage, f File) (documents.Document, error) {
	if f.ID != "" {
		return documents.Attach(ctx, tx, a.principal(), a.thread, f.ID)
	}
	return documents.AddOnce(ctx, tx, documents.Upload{
		Name: f.Name, ContentType: f.ContentType, Content: f.Content, ThreadID: a.thread, TraceID: string(a.TraceID),
		By: a.principal(), MaxBytes: c.DocumentBytes,
	})
}

func documentIDs(docs [][]documents.Document) (ids []string) {
	for _, d := range slices.Concat(docs...) {
		ids = append(ids, d.ID)
	}
	return ids
}

// collectImages returns the images of each message. If the model takes images, it adds the image files of the message.
// It leaves out a file above MaxImageSize, MaxImages, maxImageBytes or the remaining room of the thread. The model then
// reads no content of that file. It refuses images in the request itself if the thread has no room for them.
func (c *Chat) collectImages(
	ctx context.Context, tx pgx.Tx, a *UserMessage, docs [][]documents.Document,
) ([][]threads.Image, error) {
	images := make([][]threads.Image, len(a.Texts))
	copy(images, a.Images)
	if !c.agentTakesImages(a) || len(slices.Concat(docs...))+len(slices.Concat(images...)) == 0 {
		return images, nil
	}
	stored, err := threads.ImageBytes(ctx, tx, a.thread)
	if err != nil {
		return nil, err
	}
	var size int64
	for _, image := range slices.Concat(images...) {
		size += int64(len(image.Data))
	}
	room := documents.MaxThreadBytes - stored - size
	if size > 0 && room < 0 {
		return nil, fileError(fmt.Errorf("%w: limit per thread is %d bytes of images; "+
			"send https URLs, or begin another conversation", documents.ErrTooMany, documents.MaxThreadBytes))
	}
	remaining := min(maxImageBytes, room)
	for i, list := range docs {
		for _, d := range list {
			if !slices.Contains(imageTypes(), d.ContentType) || len(images[i]) >= threads.MaxImages ||
				d.Size > min(remaining, threads.MaxImageSize) {
				continue
			}
			data, err := documents.Content(ctx, tx, d.ID)
			if err != nil {
				return nil, err
			}
			remaining -= d.Size
			images[i] = append(slices.Clip(images[i]), threads.Image{MediaType: d.ContentType, Data: data})
		}
	}
	return images, nil
}

// agentTakesImages reports whether the agent's model takes images.
func (c *Chat) agentTakesImages(a *UserMessage) bool {
	return c.Loop.Model.SupportsImages(cmp.Or(a.agent.Model, c.Loop.Model.Model()))
}

// checkImages refuses images if the agent's model takes none.
func (c *Chat) checkImages(a *UserMessage) error {
	if len(slices.Concat(a.Images...)) == 0 && !slices.ContainsFunc(a.Earlier,
		func(l Line) bool { return len(l.Images) > 0 }) {
		return nil
	}
	if c.agentTakesImages(a) {
		return nil
	}
	return badRequest("messages", "image_not_supported", "The model of %s takes no images: send the message without them.",
		a.Model)
}

// loadImages returns the images of messages as the model reads them, by message id.
func (c *Chat) loadImages(ctx context.Context, messages []threads.Message) (map[string][]models.Part, error) {
	byMessage, err := threads.Images(ctx, c.Pool, messages, true)
	parts := make(map[string][]models.Part, len(byMessage))
	for id, list := range byMessage {
		for _, image := range list {
			parts[id] = append(parts[id], image.Part())
		}
	}
	return parts, err
}
